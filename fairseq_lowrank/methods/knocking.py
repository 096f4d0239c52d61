"""Knocking heads, linear: maps of features that all heads share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_lowrank.methods.standard import CACHED, PARAMETERS
from fairseq_lowrank.ops.activation import at_least_float32
from fairseq_lowrank.parts import AttentionConfig, Method, Paper, register
from fairseq_lowrank.parts.head_map import HeadMap
from fairseq_lowrank.parts.projection import KeyValueStates
from fairseq_lowrank.parts.stages import Context


class MapOfFeatures(HeadMap):
    """q_i T_q, k_i T_k, v_i T_v with three matrices that all heads share, initialised to the identity.

    Source: knocking-heads attention (arXiv 2510.23052), its linear form. The matrices fold into the projections of each head, so it
    is plain attention.
    """

    name = "features"

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.query = nn.Parameter(torch.eye(config.head_dim))
        self.key = nn.Parameter(torch.eye(config.head_dim))
        self.value = nn.Parameter(torch.eye(config.value_dim))

    def equation(self) -> str:
        return "de,hdx->hex"

    def queries(self, queries: Tensor, context: Context) -> Tensor:
        return queries @ at_least_float32(self.query)

    def states(self, states: KeyValueStates, context: Context) -> KeyValueStates:
        return {name: states[name] @ at_least_float32(getattr(self, name)) for name in ("key", "value")}


register(
    Method(
        name="knocking-linear",
        title="Knocking heads, linear: a shared map of features",
        formula="Q_i = x W_Q,i T_q   K_i = y W_K,i T_k   V_i = y W_V,i T_v,   T: d_k × d_k, shared by all heads, from I",
        parts={"head_map": MapOfFeatures},
        parameters=f"{PARAMETERS} + d_k² + d_k² + d_k²",
        cached=CACHED,
        kind="equal",
        papers=(Paper("Knocking-heads attention", "Zhou et al. 2025", "https://arxiv.org/abs/2510.23052"),),
        colour="#8da0cb",
    )
)
