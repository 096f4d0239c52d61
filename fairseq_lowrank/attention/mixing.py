"""The parameters of head mixing: of probabilities, P̄_i = Σ_j M[j, i] P_j (Mixhead paper, eq. 12), and of scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fairseq_lowrank.attention.parameters import NoDecayModule, no_weight_decay
from fairseq_lowrank.ops import DiagonalMixing, HeadMixing, PositionwiseMixing, StaticMixing


class Mixing(NoDecayModule):
    """Holds M of one layer, which is the same for all queries.

    Args:
        weight: ``[H, H]`` the start of M; ``[H]`` that of a diagonal M.
        learnable: a parameter if true, else a buffer saved with the model.
        rule: makes the operation of the weight.
    """

    def __init__(
        self, weight: Tensor, *, learnable: bool = True, rule: Callable[[Tensor], HeadMixing] = StaticMixing
    ) -> None:
        super().__init__()
        if learnable:
            self.weight = no_weight_decay(weight)
        else:
            self.register_buffer("weight", weight)
        self.register_parameter("query_weight", None)
        self.rule = rule

    def operation(self, query: Tensor) -> HeadMixing:
        """What is done to the heads of ``query`` ``[B, H, T, D]``: the heads' own queries, before the scale."""
        return self.rule(self.weight)

    def extra_repr(self) -> str:
        fixed = "" if isinstance(self.weight, nn.Parameter) else ", fixed"
        return f"{self.weight.size(0)} heads, {self.rule.__name__}{fixed}"


class PositionwiseMixingWeights(Mixing):
    """Holds B and W^M, of which each query makes its own M; W^M ``[D, H]`` starts at 0 (section 3.2)."""

    def __init__(self, base: Tensor, query_dim: int) -> None:
        super().__init__(base, rule=PositionwiseMixing)
        self.query_weight = no_weight_decay(torch.zeros(query_dim, base.size(0)))

    def operation(self, query: Tensor) -> HeadMixing:
        return PositionwiseMixing.of_queries(query, self.query_weight, self.weight)


def _random(num_heads: int) -> Tensor:
    # Drawn from the normal distribution and fixed (section 4.4.2). Columns are divided by their sums (eq. 13), as in the authors'
    # released multihead_attention.py. A sum near 0 gives large weights.
    weight = torch.randn(num_heads, num_heads)
    return weight / weight.sum(dim=0, keepdim=True)


MIXINGS = {
    "none": lambda num_heads, head_dim: None,
    "static": lambda num_heads, head_dim: Mixing(torch.eye(num_heads)),
    "positionwise": lambda num_heads, head_dim: PositionwiseMixingWeights(torch.eye(num_heads), head_dim),
    "random": lambda num_heads, head_dim: Mixing(_random(num_heads), learnable=False),
    "average": lambda num_heads, head_dim: Mixing(torch.full((num_heads, num_heads), 1 / num_heads), learnable=False),
    "diagonal": lambda num_heads, head_dim: Mixing(torch.ones(num_heads), rule=DiagonalMixing),
}
"""Builders ``(num_heads, head_dim) -> Mixing | None`` of the values of the mixing axis."""

SCORE_MIXINGS = {name: MIXINGS[name] for name in ("none", "static")}
"""Those of the axis of mixing before the softmax, S'_i = Σ_j L[j, i] S_j (talking heads, arXiv 2003.02436)."""
