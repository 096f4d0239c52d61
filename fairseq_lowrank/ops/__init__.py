"""Operations on tensors, with no parameters and no fairseq: everything here needs torch alone."""

from fairseq_lowrank.ops.activation import sigsoftmax
from fairseq_lowrank.ops.attention import (
    BACKENDS,
    AttentionCall,
    AttentionMask,
    DiagonalMixing,
    DotProduct,
    HeadMixing,
    PositionwiseMixing,
    RandomSynthesizer,
    Relative,
    Scores,
    StaticMixing,
    attention,
)

__all__ = [
    "BACKENDS",
    "AttentionCall",
    "AttentionMask",
    "DiagonalMixing",
    "DotProduct",
    "HeadMixing",
    "PositionwiseMixing",
    "RandomSynthesizer",
    "Relative",
    "Scores",
    "StaticMixing",
    "attention",
    "sigsoftmax",
]
