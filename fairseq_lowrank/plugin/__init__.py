"""The plugin that ``--user-dir`` loads: the patches of :mod:`.patches`, and our models, tasks and criterions.

fairseq itself imports only the ``models`` and ``tasks`` folders of a user directory, and not even those when the package was
imported before, so each is imported here by name. A stock fairseq checkpoint too needs ``--user-dir`` to load.
"""

import sys

from fairseq_lowrank import importing

if sys.version_info >= (3, 14):
    importing.import_fairseq()

from fairseq_lowrank.plugin import criterions, flags, patches, repairs

patches.warn_of_untested_versions()
patches.apply(patches.PATCHES)
repairs.quieten_warnings()
flags.extend_registered_models()

from fairseq_lowrank import models, tasks  # noqa: E402, F401

criterions.extend_registered_criterions()
