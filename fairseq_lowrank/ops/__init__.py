"""Operations on tensors, with no parameters and no fairseq: everything here needs torch alone."""

from fairseq_lowrank.ops.activation import sigsoftmax
from fairseq_lowrank.ops.attention import BACKENDS, AttentionMask, HeadMixing, attention

__all__ = ["BACKENDS", "AttentionMask", "HeadMixing", "attention", "sigsoftmax"]
