"""The mixing axes: the parameters of head mixing, of probabilities, P̄_i = Σ_j M[j, i] P_j (Mixhead paper, eq. 12), and of scores."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fairseq_lowrank.ops import HeadMixing, StaticMixing
from fairseq_lowrank.parts.parameters import no_weight_decay
from fairseq_lowrank.parts.projection import AttentionDims
from fairseq_lowrank.parts.stages import LayerPart


class Mixing(LayerPart):
    """A value of a mixing axis. This base class is an M of one layer, the same for all queries.

    It fills the stage ``call_fields``: the axis decides if it mixes scores or probabilities.

    Args:
        dims: the sizes of the layer.
        query_size: D, the size of a head's own queries.
    """

    weight: Tensor
    query_weight: Tensor | None
    learns: ClassVar[bool] = True
    """True if mixing has parameters. Else the weight is a buffer that is saved with the model."""
    mixes_heads: ClassVar[bool] = True
    """False if M is diagonal, so that a head gets nothing of another."""
    reads_queries: ClassVar[bool] = False
    """True if M is computed from the heads' own queries."""
    rule: ClassVar[Any] = StaticMixing
    """The class of the operation, which is built from M."""
    fields = ("prob_mixing",)

    def __init__(self, dims: AttentionDims, query_size: int) -> None:
        super().__init__()
        weight = self.initial_weight(dims.num_heads)
        if self.learns:
            self.weight = no_weight_decay(weight)
        else:
            self.register_buffer("weight", weight)
        self.register_parameter("query_weight", None)

    def initial_weight(self, num_heads: int) -> Tensor:
        """Return the initial M ``[H, H]``, or another tensor from which :meth:`matrix` computes M."""
        return torch.eye(num_heads)

    def matrix(self) -> Tensor:
        """Return what :attr:`rule` takes: M ``[H, H]``, or ``[H]`` for a diagonal M."""
        return self.weight

    def factors(self) -> Tensor | None:
        """Return the factors ``[H]`` of heads if M is diagonal, else ``None``."""
        return None

    def call_fields(self, query: Tensor | None, inputs: Tensor | None) -> dict[str, Any]:
        (field,) = self.fields
        return {field: self.operation(query, inputs)}

    def operation(self, query: Tensor | None, inputs: Tensor | None = None) -> HeadMixing:
        """Return the operation on the heads.

        Args:
            query: ``[B, H, T, D]``, the heads' own queries, before the scale.
            inputs: ``[B, T, embed_dim]``, the input of the queries.
        """
        return type(self).rule(self.matrix())

    def extra_repr(self) -> str:
        fixed = "" if isinstance(self.weight, nn.Parameter) else ", fixed"
        return f"{self.weight.size(0)} heads, {type(self).rule.__name__}{fixed}"
