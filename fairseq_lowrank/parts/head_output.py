"""The output axis: what happens to the outputs of heads before the output projection."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fairseq_lowrank.parts.parameters import NoDecayModule
from fairseq_lowrank.parts.part import Part
from fairseq_lowrank.parts.projection import AttentionDims


class HeadOutput(NoDecayModule, Part):
    """A value of the output axis.

    Args:
        dims: the sizes of the layer.
    """

    heads_per_output: ClassVar[int] = 1
    """How many heads of queries make one output."""
    changes_queries: ClassVar[bool] = False
    """True if it works with separate queries and keys of each head only."""
    reads_own_value: ClassVar[bool] = False
    """True if the output of a position depends on the position's own value, which only self-attention has."""

    def __init__(self, dims: AttentionDims) -> None:
        super().__init__()
        self.dims = dims

    @property
    def keeps_stock(self) -> bool:
        """True if the module starts as the identity, so that a state without it may continue with it."""
        return True

    def forward(self, heads: Tensor, inputs: Tensor, values: Tensor | None) -> Tensor:
        """Return ``[B, H, T, Dv]``.

        Args:
            heads: ``[B, heads_per_output * H, T, Dv]``.
            inputs: ``[B, T, embed_dim]``, the layer's query.
            values: ``[B, H, T, Dv]`` values at the positions of the queries, if :attr:`reads_own_value`.
        """
        raise NotImplementedError

    def combine_weights(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """Return the weights ``[B, H, T, S]`` with which values are averaged, from those of all heads of queries."""
        return weights
