"""How far from low rank an attention matrix is, read from its singular values.

The measures follow the Mixhead paper's section 4.4.1: after the softmax hardly any singular value is exactly zero, so a
matrix counts as of low rank when a few singular values hold most of their sum.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CURVE_POINTS = 101


def singular_values(matrices: Tensor) -> Tensor:
    """Singular values in descending order, for any number of matrices at once.

    Args:
        matrices: `[..., T, S]`; half precision is computed in float32. Rows and columns of zeros (padding) add only
            zeros at the end, so sequences of different lengths can share a batch.

    Returns:
        `[..., min(T, S)]`.
    """
    if matrices.dtype in (torch.float16, torch.bfloat16):
        matrices = matrices.float()
    return torch.linalg.svdvals(matrices)


def shares(values: Tensor) -> Tensor:
    """Each singular value's part of their sum, `[..., R]`; an all-zero matrix gives zeros."""
    return values / values.sum(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)


def cumulative_curve(values: Tensor) -> Tensor:
    """Normalised cumulative singular values (Mixhead paper, figures 1 and 3): point k is the share of the first k.

    Args:
        values: singular values in descending order, `[..., R]`.

    Returns:
        `[..., R + 1]`, from 0 to 1; equal singular values give the diagonal, rank one jumps to 1 at the first step.
    """
    return F.pad(shares(values).cumsum(-1), (1, 0))


def effective_rank(values: Tensor) -> Tensor:
    """exp of the entropy of the singular values' shares: between 1 (rank one) and R (all equal).

    Roy and Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.
    """
    return torch.special.entr(shares(values)).sum(-1).exp()


def area_under_curve(values: Tensor) -> Tensor:
    """Area under the cumulative curve over [0, 1]: 0.5 where all singular values are equal, near 1 at rank one."""
    return torch.trapezoid(cumulative_curve(values), dx=1 / values.size(-1))


def mass_in_first(values: Tensor, count: int) -> Tensor:
    """Share of the sum held by the first `count` singular values, e.g. the first d_k."""
    if count < 1:
        raise ValueError(f"count is {count}, must be at least 1")
    return shares(values)[..., :count].sum(-1)


def resample(curve: Tensor, points: int = CURVE_POINTS) -> Tensor:
    """A cumulative curve `[..., R + 1]` at `points` places even over [0, 1], so that lengths can be averaged."""
    flat = curve.reshape(-1, 1, curve.size(-1))
    flat = F.interpolate(flat, size=points, mode="linear", align_corners=True)
    return flat.reshape(*curve.shape[:-1], points)


def measures(values: Tensor, head_dim: int) -> dict[str, Tensor]:
    """All scalar measures of singular values `[..., R]`, each `[...]`.

    `rank_share` is the effective rank as a part of the greatest possible rank R.
    """
    rank = effective_rank(values)
    return {
        "effective_rank": rank,
        "rank_share": rank / values.size(-1),
        "area": area_under_curve(values),
        "mass_in_head_dim": mass_in_first(values, head_dim),
    }
