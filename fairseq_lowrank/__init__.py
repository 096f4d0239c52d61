"""Attention that breaks, avoids or measures the low-rank bottleneck, as a plugin for fairseq.

Where fairseq is loaded, as it is under ``--user-dir``, importing this package registers its models, criterions and tasks
there; ``import fairseq_lowrank.plugin`` does so anywhere. Else nothing is imported here: ``fairseq_lowrank.ops`` and
``fairseq_lowrank.attention`` need torch alone.
"""

import sys

__version__ = "0.1.0"


class _Folders(list):
    """The package's ``__path__``. fairseq asks it whether ``--user-dir`` is this package when it was imported before, and
    imports it no second time; where that was before fairseq was loaded, being asked is the occasion to register."""

    def __contains__(self, folder: object) -> bool:
        named = super().__contains__(folder)
        if named and "fairseq" in sys.modules:
            _register()
        return named


def _register() -> None:
    from fairseq_lowrank import plugin  # noqa: F401


__path__ = _Folders(__path__)
if "fairseq" in sys.modules:
    _register()
