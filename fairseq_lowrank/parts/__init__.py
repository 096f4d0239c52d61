"""What a part of a layer is, a base class for each axis, and the registry of methods. Imports torch and ``ops`` alone."""

from fairseq_lowrank.parts.config import AttentionConfig
from fairseq_lowrank.parts.distance_bias import DistanceBias
from fairseq_lowrank.parts.head_map import HeadMap
from fairseq_lowrank.parts.head_output import HeadOutput
from fairseq_lowrank.parts.mixing import Mixing
from fairseq_lowrank.parts.parameters import NoDecayModule, no_weight_decay
from fairseq_lowrank.parts.part import Option, Part
from fairseq_lowrank.parts.projection import Projection
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
from fairseq_lowrank.parts.rotary import RotaryPositions, Rotation
from fairseq_lowrank.parts.score import ScoreFunction
from fairseq_lowrank.parts.spec import AttentionSpec
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
    "AttentionConfig",
    "AttentionSpec",
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
    "Projection",
    "RotaryPositions",
    "Rotation",
    "ScoreFunction",
    "evaluate",
    "no_weight_decay",
    "parts_of",
    "register",
]
