"""Attention that breaks, avoids or measures the low-rank bottleneck, as a plugin for fairseq.

If fairseq is loaded, as it is under ``--user-dir``, importing this package registers its models, criterions and tasks.
``import fairseq_lowrank.plugin`` registers them at any time. Otherwise nothing is imported here:
``fairseq_lowrank.ops`` and ``fairseq_lowrank.attention`` need torch alone.
"""

import sys

__version__ = "0.1.0"

if "fairseq" in sys.modules:
    from fairseq_lowrank import plugin  # noqa: F401
