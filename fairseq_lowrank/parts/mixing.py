"""The mixing axes: the parameters of head mixing, of probabilities, P̄_i = Σ_j M[j, i] P_j (Mixhead paper, eq. 12), and of scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fairseq_lowrank.ops import AttentionCall, HeadMixing, StaticMixing
from fairseq_lowrank.parts.parameters import assign
from fairseq_lowrank.parts.plain import Inexact, scale_queries
from fairseq_lowrank.parts.stages import Context, LayerPart

if TYPE_CHECKING:
    from fairseq_lowrank.parts.sizes import LayerSizes


class Mixing(LayerPart):
    """A value of a mixing axis. This base class is an M of one layer, the same for all queries.

    It fills the step ``call``: the axis decides if it mixes scores or probabilities.

    Args:
        config: of the layer.
        query_size: D, the size of a head's own queries.

    Attributes:
        field: the field of the call that it sets.
    """

    weight: Tensor
    query_weight: Tensor | None
    reads_inputs: ClassVar[bool] = False
    mixes_heads: ClassVar[bool] = True
    """False if M is diagonal, so that a head gets nothing of another."""
    reads_queries: ClassVar[bool] = False
    """True if M is computed from the heads' own queries."""
    rule: ClassVar[Any] = StaticMixing
    """The class of the operation, which is built from M."""
    field = "prob_mixing"

    def __init__(self, config: LayerSizes, query_size: int) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        weight = self.initial_weight(config.num_heads)
        if self.learns:
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight)
        self.register_parameter("query_weight", None)

    @property
    def rows_sum_to_one(self) -> bool:
        return self.field == "score_mixing"

    def initial_weight(self, num_heads: int) -> Tensor:
        """Return the initial M ``[H, H]``, or another tensor from which :meth:`matrix` computes M."""
        return torch.eye(num_heads)

    def reset_parameters(self) -> None:
        assign(self.weight, self.initial_weight(self.num_heads))

    def matrix(self) -> Tensor:
        """Return what :attr:`rule` takes: M ``[H, H]``, or ``[H]`` for a diagonal M."""
        return self.weight

    def fixed_matrix(self) -> Tensor | None:
        """Return M ``[H, H]`` if it is the same for all queries, with these values of the parameters, else ``None``."""
        if self.reads_inputs or self.reads_queries:
            return None
        matrix = self.matrix()
        return matrix.diag() if matrix.dim() == 1 else matrix

    def _fixed_matrix(self) -> Tensor:
        if (matrix := self.fixed_matrix()) is None:
            raise Inexact("M depends on the query")
        return matrix

    @torch.no_grad()
    def take_over(self, other: Mixing) -> None:
        if not self.learns:
            raise Inexact(f"{self.name!r} is fixed, so it cannot have this M")
        matrix = other._fixed_matrix()
        self.set_matrix(matrix)
        if (result := self.fixed_matrix()) is None or not torch.allclose(result, matrix, rtol=1e-6, atol=1e-6):
            raise Inexact(f"{self.name!r} cannot have this M")

    def set_matrix(self, matrix: Tensor) -> None:
        """Set the parameters so that M is ``matrix [H, H]``, or come close to it."""
        assign(self.weight, matrix)

    @torch.no_grad()
    def fold(self, layer: Any) -> None:
        """Fold M into the output projection, whose rows for head i are W_i, or a diagonal L into the queries.

        A diagonal M scales rows: W_i' = M[i, i] W_i. If all heads share one value V, Σ_i Σ_j M[j, i] P_j V W_i =
        Σ_j P_j V (Σ_i M[j, i] W_i), so W_j' = Σ_i M[j, i] W_i.
        """
        matrix = self._fixed_matrix()
        factors = matrix.diag()
        diagonal = torch.equal(matrix, factors.diag())
        if self.field == "score_mixing":
            if not diagonal:
                raise Inexact("L mixes the scores of heads")
            scale_queries(layer, factors)
        elif diagonal or layer.projection.share_value(layer):
            weight = layer.out_proj.weight
            heads = weight.unflatten(1, (self.num_heads, -1))
            folded = heads * factors[:, None] if diagonal else torch.einsum("ji,oid->ojd", matrix, heads)
            assign(weight, folded.flatten(1))
        else:
            raise Inexact("M mixes heads that have separate values")

    def call(self, call: AttentionCall, context: Context) -> AttentionCall:
        operation = self.operation(context.queries, context.inputs)
        if self._forward_hooks:  # such as those of FSDP, which frees the weight as soon as this module returns
            operation = operation.map_tensors(torch.clone)
        return call.adding(**{self.field: operation})

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
