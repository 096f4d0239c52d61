"""Knocking heads, linear: maps of features that all heads share."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_lowrank.parts.head_map import HeadMap
from fairseq_lowrank.parts.parameters import no_weight_decay
from fairseq_lowrank.parts.projection import AttentionDims, KeyValueStates


class MapOfFeatures(HeadMap):
    """q_i T_q, k_i T_k, v_i T_v with three matrices that all heads share, initialised to the identity.

    Source: knocking-heads attention (arXiv 2510.23052), its linear form. The matrices fold into the projections of each head, so it
    is plain attention.
    """

    name = "features"

    def __init__(self, dims: AttentionDims) -> None:
        super().__init__(dims)
        self.query = no_weight_decay(torch.eye(dims.head_dim))
        self.key = no_weight_decay(torch.eye(dims.head_dim))
        self.value = no_weight_decay(torch.eye(dims.value_dim))

    def map_query(self, q: Tensor) -> Tensor:
        return q @ self.query

    def map_states(self, states: KeyValueStates) -> KeyValueStates:
        return {"key": states["key"] @ self.key, "value": states["value"] @ self.value}
