"""The registered models: fairseq's own, with attention built from one set of flags."""

import fairseq_lowrank.plugin  # noqa: F401  first, so that an import of a model alone applies the patches too
from fairseq_lowrank.models import bert, language_model, transformer, transformer_xl  # noqa: F401
