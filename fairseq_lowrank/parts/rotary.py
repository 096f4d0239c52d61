"""Rotary positions: queries and keys turned by angles that grow with their positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Rotation = Callable[[Tensor, Tensor], Tensor]
"""A function or module of projected heads ``[B, H, T, D]`` and their positions ``[T]`` (int64) that returns ``[B, H, T, D]``."""


class RotaryPositions(nn.Module):
    """Turn features i and i + D/2 of a position p by the angle p / base^(2i / D), with which q·k depends on distances alone.

    Source: RoFormer (Su et al. 2021, arXiv 2104.09864, equation 34), with pairs of features as in Llama of ``transformers``.

    Args:
        base: a greater base turns more slowly.
    """

    def __init__(self, base: float = 10000.0) -> None:
        super().__init__()
        self.base = base

    def check_size(self, size: int, name: str = "head_dim") -> None:
        """Check the number of features that turn, the argument ``name``, when a layer is built.

        Raises:
            ValueError: it is odd.
        """
        if size % 2:
            raise ValueError(f"{name}={size}: rotary positions turn pairs of features. Choose an even number.")

    def forward(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Return turned heads ``[B, H, T, D]``; D is even.

        Raises:
            ValueError: D is odd.
        """
        size = heads.size(-1)
        self.check_size(size)
        exact = torch.promote_types(heads.dtype, torch.float32)
        exponents = torch.arange(0, size, 2, dtype=exact, device=heads.device) / size
        angles = positions[:, None].to(exact) / self.base**exponents
        cos, sin = angles.cos(), angles.sin()
        first, second = heads.to(exact).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)

    def extra_repr(self) -> str:
        return f"base={self.base:g}"
