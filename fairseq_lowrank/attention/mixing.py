"""How heads' probabilities are mixed: the mixing axis. P̄_i = Σ_j M[j, i] P_j (Mixhead paper, eq. 12)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_lowrank.ops import HeadMixing


class Mixing(nn.Module):
    """Holds M (or B and W^M) of one layer.

    Args:
        weight: ``[H, H]`` the start of M, or of the base B of position-wise mixing; ``[H]`` that of a diagonal M.
        learnable: a parameter if true, else a buffer saved with the model.
        query_dim: with it mixing is position-wise and W^M ``[query_dim, H]`` starts at 0 (section 3.2).
    """

    def __init__(self, weight: Tensor, *, learnable: bool, query_dim: int | None = None) -> None:
        super().__init__()
        if learnable:
            self.weight = _undecayed(weight)
        else:
            self.register_buffer("weight", weight)
        self.query_weight = _undecayed(torch.zeros(query_dim, weight.size(-1))) if query_dim is not None else None

    def weights(self) -> HeadMixing:
        return HeadMixing(self.weight, self.query_weight)

    def extra_repr(self) -> str:
        static = "diagonal" if self.weight.dim() == 1 else "static"
        kind = static if self.query_weight is None else "position-wise"
        return f"{self.weight.size(0)} heads, {kind}{'' if isinstance(self.weight, nn.Parameter) else ', fixed'}"


def _undecayed(weight: Tensor) -> nn.Parameter:
    """A parameter exempt from weight decay, which would pull M towards 0, not towards I."""
    parameter = nn.Parameter(weight)
    parameter.optim_overrides = {"optimizer": {"weight_decay": 0.0}}
    return parameter


def _random(num_heads: int) -> Tensor:
    # The paper says only "normal and fixed". Columns are given unit ℓ2 norm, as in its eq. 14; dividing by their sum
    # (eq. 13) would be unstable, since a sum can be near 0.
    weight = torch.randn(num_heads, num_heads)
    return weight / weight.norm(dim=0, keepdim=True)


MIXINGS = {
    "none": lambda num_heads, head_dim: None,
    "static": lambda num_heads, head_dim: Mixing(torch.eye(num_heads), learnable=True),
    "positionwise": lambda num_heads, head_dim: Mixing(torch.eye(num_heads), learnable=True, query_dim=head_dim),
    "random": lambda num_heads, head_dim: Mixing(_random(num_heads), learnable=False),
    "average": lambda num_heads, head_dim: Mixing(torch.full((num_heads, num_heads), 1 / num_heads), learnable=False),
    "diagonal": lambda num_heads, head_dim: Mixing(torch.ones(num_heads), learnable=True),
}
"""Builders ``(num_heads, head_dim) -> Mixing | None`` of the values of the mixing axis."""
