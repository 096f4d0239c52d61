"""The registered models: fairseq's own, with attention built from one set of flags."""

from fairseq_lowrank.models import language_model, transformer  # noqa: F401
