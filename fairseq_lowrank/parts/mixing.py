"""The parameters of head mixing: of probabilities, P̄_i = Σ_j M[j, i] P_j (Mixhead paper, eq. 12), and of scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_lowrank.ops import DiagonalMixing, HeadMixing, PositionwiseMixing, StaticMixing
from fairseq_lowrank.ops.activation import at_least_float32, without_autocast
from fairseq_lowrank.parts.parameters import NoDecayModule, no_weight_decay

NORMALIZATIONS = ("none", "sum", "l2")
"""Normalisations of the columns of M, see :func:`normalize_columns`."""
NORMALIZED_MIXINGS = ("static", "positionwise")
"""The mixings that can be normalised: those that learn whole columns."""


def normalize_columns(matrix: Tensor, normalization: str) -> Tensor:
    """Divide each column of M ``[..., H, H]`` by its sum (Mixhead paper, eq. 13) or by its ℓ2 norm (eq. 14).

    A sum may be 0 or near 0, which makes eq. 13 numerically unstable; eq. 14 has no such limit.
    """
    if normalization == "none":
        return matrix
    matrix = at_least_float32(matrix)
    if normalization == "sum":
        return matrix / matrix.sum(dim=-2, keepdim=True)
    return matrix / torch.linalg.vector_norm(matrix, dim=-2, keepdim=True)


class Mixing(NoDecayModule):
    """The M of one layer, which is the same for all queries.

    Args:
        weight: ``[H, H]``, the initial M; ``[H]`` for a diagonal M.
        learnable: if true the weight is a parameter, else a buffer that is saved with the model.
        rule: builds the operation from M.
        normalization: of the columns of M, one of :data:`NORMALIZATIONS`.
    """

    weight: Tensor
    query_weight: Tensor | None
    reads_inputs: ClassVar[bool] = False

    def __init__(
        self,
        weight: Tensor,
        *,
        learnable: bool = True,
        rule: Callable[[Tensor], HeadMixing] = StaticMixing,
        normalization: str = "none",
    ) -> None:
        super().__init__()
        if learnable:
            self.weight = no_weight_decay(weight)
        else:
            self.register_buffer("weight", weight)
        self.register_parameter("query_weight", None)
        self.rule, self.normalization = rule, normalization

    def operation(self, query: Tensor | None, inputs: Tensor | None = None) -> HeadMixing:
        """Return the operation on the heads.

        Args:
            query: ``[B, H, T, D]``, the heads' own queries, before the scale.
            inputs: ``[B, T, embed_dim]``, the input of the queries.
        """
        return self.rule(normalize_columns(self.weight, self.normalization))

    def extra_repr(self) -> str:
        fixed = "" if isinstance(self.weight, nn.Parameter) else ", fixed"
        normalized = "" if self.normalization == "none" else f", columns divided by their {self.normalization}"
        return f"{self.weight.size(0)} heads, {self.rule.__name__}{fixed}{normalized}"


class PositionwiseMixingWeights(Mixing):
    """B and W^M, from which each query computes its M; W^M ``[D, H]`` starts at 0 (section 3.2)."""

    query_weight: Tensor

    def __init__(self, base: Tensor, query_dim: int, normalization: str = "none") -> None:
        super().__init__(base, rule=PositionwiseMixing, normalization=normalization)
        self.query_weight = no_weight_decay(torch.zeros(query_dim, base.size(0)))

    def operation(self, query: Tensor | None, inputs: Tensor | None = None) -> HeadMixing:
        assert query is not None
        mixing = PositionwiseMixing.of_queries(query, self.query_weight, self.weight)
        if self.normalization == "none":
            return mixing
        return PositionwiseMixing(normalize_columns(mixing.weight, self.normalization))


class DynamicMixing(NoDecayModule):
    """M_t = I + Σ_{ρ≤R} w1_ρ(x_t) w2_ρ(x_t)ᵀ + diag(tanh(x_t W_d)) with w1_ρ, w2_ρ: d→h linear, w2 and W_d from 0.

    Source: dynamically composable multi-head attention (Xiao et al. 2024, arXiv 2405.08553), its query-wise part; details from
    ``pytorch/dcformer`` of ``Caiyun-AI/DCFormer``, whose hidden layer and norm of w1 are left out.
    """

    reads_inputs: ClassVar[bool] = True

    def __init__(self, num_heads: int, embed_dim: int, rank: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.first = no_weight_decay(nn.init.xavier_uniform_(torch.empty(rank * num_heads, embed_dim)))
        self.second = no_weight_decay(torch.zeros(rank * num_heads, embed_dim))
        self.diagonal = no_weight_decay(torch.zeros(num_heads, embed_dim))
        self.register_parameter("query_weight", None)

    def operation(self, query: Tensor, inputs: Tensor) -> PositionwiseMixing:
        """Return the operation on the heads at each query of ``inputs [B, T, embed_dim]``."""
        with without_autocast(inputs):
            inputs = at_least_float32(inputs)
            first, second, diagonal = (
                F.linear(inputs, at_least_float32(w)) for w in (self.first, self.second, self.diagonal)
            )
            first, second = (tensor.unflatten(-1, (-1, self.num_heads)) for tensor in (first, second))
            identity = torch.eye(self.num_heads, dtype=inputs.dtype, device=inputs.device)
            return PositionwiseMixing(identity + first.mT @ second + torch.diag_embed(torch.tanh(diagonal)))

    def extra_repr(self) -> str:
        return f"{self.num_heads} heads, rank {len(self.first) // self.num_heads}"


def _random(num_heads: int) -> Tensor:
    # Drawn from the normal distribution and fixed (section 4.4.2). Columns are divided by their sums (eq. 13), as in the authors'
    # released multihead_attention.py. A sum near 0 gives large weights.
    weight = torch.randn(num_heads, num_heads)
    return weight / weight.sum(dim=0, keepdim=True)


def _build_static(num_heads: int, head_dim: int, normalization: str = "none") -> Mixing:
    return Mixing(torch.eye(num_heads), normalization=normalization)


def _build_positionwise(num_heads: int, head_dim: int, normalization: str = "none") -> Mixing:
    return PositionwiseMixingWeights(torch.eye(num_heads), head_dim, normalization)


MixingBuilder = Callable[..., Any]
MIXINGS: dict[str, MixingBuilder] = {
    "none": lambda num_heads, head_dim: None,
    "static": _build_static,
    "positionwise": _build_positionwise,
    "random": lambda num_heads, head_dim: Mixing(_random(num_heads), learnable=False),
    "average": lambda num_heads, head_dim: Mixing(torch.full((num_heads, num_heads), 1 / num_heads), learnable=False),
    "diagonal": lambda num_heads, head_dim: Mixing(torch.ones(num_heads), rule=DiagonalMixing),
    "dynamic": lambda num_heads, head_dim, embed_dim=1, rank=2: DynamicMixing(num_heads, embed_dim, rank),
}
"""Builders ``(num_heads, head_dim) -> Mixing | None`` of the values of the mixing axis. Those of :data:`NORMALIZED_MIXINGS` take
a normalisation too, ``dynamic`` the input's size and a rank."""

SCORE_MIXINGS = {name: MIXINGS[name] for name in ("none", "static", "dynamic")}
"""Builders of the axis of mixing before the softmax, S'_i = Σ_j L[j, i] S_j (talking heads, arXiv 2003.02436)."""
