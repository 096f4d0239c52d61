"""What ``--user-dir`` has to bring about in fairseq: repairs first, then our models, criterions and tasks.

fairseq itself imports only the ``models`` and ``tasks`` folders of a user directory, and not even those when
the package was imported before, so each is imported here by name.
"""

from fairseq_lowrank import compat

compat.apply()

from fairseq_lowrank import criterions, models  # noqa: E402, F401
