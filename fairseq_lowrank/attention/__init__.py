"""The attention layer as a composition of independent choices; needs torch alone."""

from fairseq_lowrank.attention.build import build_attention
from fairseq_lowrank.attention.config import AttentionConfig
from fairseq_lowrank.attention.groups import parameter_groups
from fairseq_lowrank.attention.layer import MultiheadAttention
from fairseq_lowrank.attention.masks import CAUSAL, PackedDocuments, SlidingWindow
from fairseq_lowrank.attention.replace import replace_attention
from fairseq_lowrank.attention.rotary import RotaryPositions
from fairseq_lowrank.attention.sharding import shard_parts, whole_state_dict
from fairseq_lowrank.attention.spec import AttentionSpec
from fairseq_lowrank.parts import AXES, METHODS, PRESETS, Method, Paper, register

__all__ = [
    "AXES",
    "CAUSAL",
    "METHODS",
    "PRESETS",
    "AttentionConfig",
    "AttentionSpec",
    "Method",
    "MultiheadAttention",
    "PackedDocuments",
    "Paper",
    "RotaryPositions",
    "SlidingWindow",
    "build_attention",
    "parameter_groups",
    "register",
    "replace_attention",
    "shard_parts",
    "whole_state_dict",
]
