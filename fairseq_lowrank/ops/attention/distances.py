"""Biases of scores that depend on the distance of a query and a key alone, kept as one number for each distance.

A bias ``[B, H, T + S − 1]`` stands for ``[B, H, T, S]``: query t adds entry T − 1 − t + s to the score of key s.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def spread(bias: Tensor, queries: int, keys: int, repeats: int = 1) -> Tensor:
    """Return what a bias adds to each score, ``[B, H, repeats * T, S]``.

    Args:
        bias: ``[B, H, T + S − 1]``, one number for each distance.
        queries: T, the queries of one repeat.
        keys: S.
        repeats: the queries are counted from 0 again this many times.
    """
    if not queries or not keys:
        return bias.new_zeros(*bias.shape[:2], queries * repeats, keys)
    rows = bias.unfold(-1, keys, 1).flip(-2)
    return rows.repeat(1, 1, repeats, 1) if repeats > 1 else rows


def collect(grad: Tensor) -> Tensor:
    """Return the sums ``[..., T + S − 1]`` of a gradient ``[..., T, S]`` over the scores of each distance."""
    queries, keys = grad.shape[-2:]
    width = queries + keys - 1
    # Read in rows that are longer by T − 1 than they are written, each begins one further to the right.
    padded = F.pad(grad.flip(-2), (0, queries)).flatten(-2)[..., : queries * width]
    return padded.unflatten(-1, (queries, width)).sum(dim=-2)
