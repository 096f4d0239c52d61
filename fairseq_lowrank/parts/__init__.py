"""What a part of a layer is, a base class for each axis, and the registry of methods. Imports torch and ``ops`` alone."""

from fairseq_lowrank.parts.head_map import HeadMap
from fairseq_lowrank.parts.head_output import HeadOutput
from fairseq_lowrank.parts.mixing import Mixing
from fairseq_lowrank.parts.parameters import NoDecayModule, no_weight_decay
from fairseq_lowrank.parts.part import Option, Part
from fairseq_lowrank.parts.projection import AttentionDims, Projection
from fairseq_lowrank.parts.registry import (
    AXES,
    CLASSES,
    METHODS,
    PARTS,
    PRESETS,
    Axis,
    Method,
    Need,
    Paper,
    evaluate,
    register,
)
from fairseq_lowrank.parts.score import ScoreFunction

__all__ = [
    "AXES",
    "CLASSES",
    "METHODS",
    "PARTS",
    "PRESETS",
    "AttentionDims",
    "Axis",
    "HeadMap",
    "HeadOutput",
    "Method",
    "Mixing",
    "Need",
    "NoDecayModule",
    "Option",
    "Paper",
    "Part",
    "Projection",
    "ScoreFunction",
    "evaluate",
    "no_weight_decay",
    "register",
]
