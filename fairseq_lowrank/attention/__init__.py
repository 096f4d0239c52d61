"""The attention layer as a composition of independent choices; needs torch alone."""

import fairseq_lowrank.methods  # noqa: F401  registers the methods
from fairseq_lowrank.attention.build import build_attention
from fairseq_lowrank.attention.core import CoreAttention, build_core
from fairseq_lowrank.attention.decoding import DecodingCache
from fairseq_lowrank.attention.groups import muon_split, parameter_groups, train_only
from fairseq_lowrank.attention.layer import MultiheadAttention
from fairseq_lowrank.attention.masks import CAUSAL, Hidden, PackedDocuments, Prefix, SlidingWindow, Visible
from fairseq_lowrank.attention.replace import replace_attention, to_stock
from fairseq_lowrank.attention.sharding import shard_parts, whole_state_dict
from fairseq_lowrank.parts import (
    AXES,
    METHODS,
    PRESETS,
    AttentionConfig,
    AttentionSpec,
    Method,
    Paper,
    RotaryPositions,
    register,
)

__all__ = [
    "AXES",
    "CAUSAL",
    "METHODS",
    "PRESETS",
    "AttentionConfig",
    "AttentionSpec",
    "CoreAttention",
    "DecodingCache",
    "Hidden",
    "Method",
    "MultiheadAttention",
    "PackedDocuments",
    "Paper",
    "Prefix",
    "RotaryPositions",
    "SlidingWindow",
    "Visible",
    "build_attention",
    "build_core",
    "muon_split",
    "parameter_groups",
    "register",
    "replace_attention",
    "shard_parts",
    "to_stock",
    "train_only",
    "whole_state_dict",
]
