"""Attention that breaks, avoids or measures the low-rank bottleneck, as a plugin for fairseq.

With fairseq installed, importing this package registers its models, criterions and tasks, as fairseq's
``--user-dir`` expects. Without fairseq, ``fairseq_lowrank.ops`` and ``fairseq_lowrank.attention`` work on
torch alone. A fairseq that is installed but broken raises its own error here.
"""

import importlib.util

__version__ = "0.1.0"

if importlib.util.find_spec("fairseq") is not None:
    from fairseq_lowrank import plugin  # noqa: F401
