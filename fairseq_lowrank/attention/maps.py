"""The map axis: static linear maps of projected queries, keys and values, over features or over heads."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_lowrank.attention.parameters import NoDecayModule, no_weight_decay
from fairseq_lowrank.attention.projections.projection import AttentionDims, KeyValueStates


class HeadMap(NoDecayModule):
    """A value of the map axis."""

    def __init__(self, dims: AttentionDims) -> None:
        super().__init__()

    def map_query(self, q: Tensor) -> Tensor:
        """Return mapped queries ``[B, H, T, D]``."""
        raise NotImplementedError

    def map_states(self, states: KeyValueStates) -> KeyValueStates:
        """Return mapped keys and values ``[B, G, S, D]``, as they are cached."""
        raise NotImplementedError


class MapOfFeatures(HeadMap):
    """q_i T_q, k_i T_k, v_i T_v with three matrices that all heads share, initialised to the identity.

    Source: knocking-heads attention (arXiv 2510.23052), its linear form. The matrices fold into the projections of each head, so it
    is plain attention.
    """

    def __init__(self, dims: AttentionDims) -> None:
        super().__init__(dims)
        self.query = no_weight_decay(torch.eye(dims.head_dim))
        self.key = no_weight_decay(torch.eye(dims.head_dim))
        self.value = no_weight_decay(torch.eye(dims.value_dim))

    def map_query(self, q: Tensor) -> Tensor:
        return q @ self.query

    def map_states(self, states: KeyValueStates) -> KeyValueStates:
        return {"key": states["key"] @ self.key, "value": states["value"] @ self.value}


class MapOfHeads(HeadMap):
    """k_i ← Σ_j A[j, i] k_j and v_i ← Σ_j C[j, i] v_j with two h×h matrices, initialised to the identity.

    Source: explicit multi-head attention, MEA (arXiv 2601.19611), its head-level linear composition without norms. The matrices fold into
    the projections, so it is plain attention.
    """

    def __init__(self, dims: AttentionDims) -> None:
        super().__init__(dims)
        groups = dims.key_value_heads or dims.num_heads
        self.key = no_weight_decay(torch.eye(groups))
        self.value = no_weight_decay(torch.eye(groups))

    def map_query(self, q: Tensor) -> Tensor:
        return q

    def map_states(self, states: KeyValueStates) -> KeyValueStates:
        return {
            name: torch.einsum("ji,bjsd->bisd", getattr(self, name).to(states[name].dtype), states[name])
            for name in ("key", "value")
        }


HEAD_MAPS: dict[str, type[HeadMap] | None] = {"none": None, "features": MapOfFeatures, "heads": MapOfHeads}
"""The values of the map axis."""
