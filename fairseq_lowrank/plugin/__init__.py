"""The plugin that ``--user-dir`` loads: the patches of :mod:`.patches`, and our models, tasks and criterions.

Models and tasks build on this package, so it names none of them. A stock fairseq checkpoint too needs ``--user-dir`` to load.
"""

import fairseq_lowrank.repairs  # noqa: F401  first: fairseq needs it to be imported at all
from fairseq_lowrank import importing
from fairseq_lowrank.plugin import criterions, flags, patches
from fairseq_lowrank.repairs import patch

patch.apply(patches.PATCHES)
flags.extend_registered_models()
importing.import_models_and_tasks()
criterions.extend_registered_criterions()
