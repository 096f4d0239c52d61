"""The base class of biases that depend on the distance of a query and a key alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fairseq_lowrank.ops import AttentionCall
from fairseq_lowrank.parts.plain import Inexact
from fairseq_lowrank.parts.stages import Context, LayerPart

if TYPE_CHECKING:
    from fairseq_lowrank.parts.sizes import LayerSizes


class DistanceBias(LayerPart):
    """A value of the axis ``score_bias`` that adds b_i(s − t) to the score of head i, for a query at t and a key at s.

    It fills the step ``call``. Memory grows with the number of distances, not with that of scores.

    Args:
        config: of the layer.

    Attributes:
        num_heads: H, the number of heads of scores.
    """

    reads_inputs = reads_queries = False
    reads_positions = True

    def __init__(self, config: LayerSizes) -> None:
        super().__init__()
        self.num_heads = config.num_heads * config.queries_per_head

    def call(self, call: AttentionCall, context: Context) -> AttentionCall:
        _, _, queries, keys = call.scores.shape
        positions = queries // context.repeats
        entries = torch.arange(max(positions + keys - 1, 0), device=call.v.device) - (positions - 1)
        first = context.first
        distances = entries - (first[:, None] if isinstance(first, Tensor) else first)  # a number, also a symbolic one
        return call.adding(distance_bias=self.bias(distances if distances.dim() == 2 else distances[None]))

    def fold(self, layer: Any) -> None:
        raise Inexact("it depends on the distance of query and key")

    def bias(self, distances: Tensor) -> Tensor:
        """Return the biases ``[B, H, N]`` of distances ``[B, N]`` (int64), key minus query; negative ones are in the past.

        B is 1 if the distances of all batch entries are equal.
        """
        raise NotImplementedError
