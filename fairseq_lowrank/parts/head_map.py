"""The map axis: static linear maps of projected queries, keys and values, over features or over heads."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fairseq_lowrank.parts.parameters import NoDecayModule
from fairseq_lowrank.parts.part import Part
from fairseq_lowrank.parts.projection import AttentionDims, KeyValueStates


class HeadMap(NoDecayModule, Part):
    """A value of the map axis."""

    changes_queries: ClassVar[bool] = True
    """True if it works with separate queries and keys of each head only."""

    def __init__(self, dims: AttentionDims) -> None:
        super().__init__()

    def equation(self) -> str:
        """Return how a map ``[., .]`` and weights ``[H, D, inputs]`` give mapped weights, for ``torch.einsum``."""
        raise NotImplementedError

    def map_query(self, q: Tensor) -> Tensor:
        """Return mapped queries ``[B, H, T, D]``."""
        raise NotImplementedError

    def map_states(self, states: KeyValueStates) -> KeyValueStates:
        """Return mapped keys and values ``[B, G, S, D]``, as they are cached."""
        raise NotImplementedError
