"""Repairs of bugs in fairseq that give wrong results or crash on valid input."""

from fairseq_lowrank.plugin.fixes import checkpoints, search, subwords

PATCHES = (*search.PATCHES, *checkpoints.PATCHES, *subwords.PATCHES)
