"""Attention that breaks, avoids or measures the low-rank bottleneck, as a plugin for fairseq.

Importing this package and fairseq, in any order, registers the models, criterions and tasks of :mod:`.plugin`.
Until fairseq is imported, nothing is: ``fairseq_lowrank.ops`` and ``fairseq_lowrank.attention`` need torch alone.
"""

from .importing import activate

__version__ = "0.3.0.dev0"

activate(__name__)
