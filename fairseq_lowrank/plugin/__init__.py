"""The plugin that ``--user-dir`` loads: the patches of :mod:`.patches`, and our models, tasks and criterions.

fairseq itself imports only the ``models`` and ``tasks`` folders of a user directory, and not even those when the package was
imported before, so each is imported here by name. A stock fairseq checkpoint too needs ``--user-dir`` to load.
"""

import fairseq_lowrank.repairs  # noqa: F401  first: fairseq needs it to be imported at all
from fairseq_lowrank.plugin import criterions, flags, patches
from fairseq_lowrank.repairs import patch

patch.apply(patches.PATCHES)
flags.extend_registered_models()

from fairseq_lowrank import models, tasks  # noqa: E402, F401

criterions.extend_registered_criterions()
