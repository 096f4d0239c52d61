"""The map axis: static linear maps of projected queries, keys and values, over features or over heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fairseq_lowrank.parts.parameters import assign
from fairseq_lowrank.parts.stages import LayerPart

if TYPE_CHECKING:
    from fairseq_lowrank.parts.sizes import LayerSizes


class HeadMap(LayerPart):
    """A value of the map axis. It fills the steps ``queries`` and ``states``."""

    reads_inputs: ClassVar[bool] = False
    reads_queries: ClassVar[bool] = False
    before_norm = True
    folds = True
    changes_queries: ClassVar[bool] = True
    """True if it works with separate queries and keys of each head only."""

    def __init__(self, config: LayerSizes) -> None:
        super().__init__()

    def reset_parameters(self) -> None:
        for matrix in self.parameters():
            assign(matrix, torch.eye(len(matrix)))

    def equation(self) -> str:
        """Return how a map ``[., .]`` and weights ``[H, D, inputs]`` give mapped weights, for ``torch.einsum``."""
        raise NotImplementedError

    @torch.no_grad()
    def fold(self, layer: Any) -> None:
        groups = layer.projection.state_heads
        for name, heads in (("query", layer.num_heads), ("key", groups), ("value", groups)):
            if (matrix := getattr(self, name, None)) is not None:
                projection = getattr(layer, f"{name[0]}_proj")
                for tensor in (projection.weight, projection.bias):
                    if tensor is not None:
                        columns = tensor.view(heads, -1, 1 if tensor.dim() == 1 else tensor.size(1))
                        assign(tensor, torch.einsum(self.equation(), matrix, columns).reshape(tensor.shape))
