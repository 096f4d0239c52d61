"""What a part of a layer is, a base class for each axis, and the registry of methods. Imports torch and ``ops`` alone."""

from fairseq_lowrank.parts.distance_bias import DistanceBias
from fairseq_lowrank.parts.head_map import HeadMap
from fairseq_lowrank.parts.head_output import HeadOutput
from fairseq_lowrank.parts.mixing import Mixing
from fairseq_lowrank.parts.parameters import NoDecayModule, no_weight_decay
from fairseq_lowrank.parts.part import Option, Part, Place
from fairseq_lowrank.parts.projection import AttentionDims, Projection
from fairseq_lowrank.parts.registry import (
    AXES,
    CLASSES,
    METHODS,
    MODULE_AXES,
    PARTS,
    PLAIN,
    PRESETS,
    SLOTS,
    Axis,
    LayerParts,
    Method,
    Need,
    Paper,
    evaluate,
    parts_of,
    register,
)
from fairseq_lowrank.parts.score import ScoreFunction
from fairseq_lowrank.parts.stages import Context, LayerPart

__all__ = [
    "AXES",
    "CLASSES",
    "METHODS",
    "MODULE_AXES",
    "PARTS",
    "PLAIN",
    "PRESETS",
    "SLOTS",
    "AttentionDims",
    "Axis",
    "Context",
    "DistanceBias",
    "HeadMap",
    "HeadOutput",
    "LayerPart",
    "LayerParts",
    "Method",
    "Mixing",
    "Need",
    "NoDecayModule",
    "Option",
    "Paper",
    "Part",
    "Place",
    "Projection",
    "ScoreFunction",
    "evaluate",
    "no_weight_decay",
    "parts_of",
    "register",
]
