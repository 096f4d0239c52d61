"""Directions of a bilinear form: their energies, and the best map of lower rank.

A head compares queries q and keys k, both of size E. Let C_q and C_k be their second moments, with keys centred within each
sequence, because softmax ignores a row's constant. If C_k^½ C_q^½ = U S Vᵀ, then S_j² is the energy of direction j: the mean
square of the logits is Σ_j S_j² for independent queries and keys. Among the maps B of rank r, k ↦ k·B with

    B_r = C_k^−½ U_r U_rᵀ C_k^½

has the least mean square of q·k − q·(k B). The same formula cuts values, with the second moment of a head's output for C_k and
W_O W_Oᵀ for C_q. All numbers are float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = 1e-12
"""Eigenvalues below this share of the greatest one count as 0."""


class Moments:
    """Sums over tokens from which the second moments of some heads' vectors follow.

    Args:
        heads: number of heads H.
        size: size E of a vector.
    """

    def __init__(self, heads: int, size: int) -> None:
        self.count = 0
        self.sums = torch.zeros(heads, size, dtype=torch.float64)
        self.squares = torch.zeros(heads, size, size, dtype=torch.float64)
        self.centred_squares = torch.zeros_like(self.squares)

    def add(self, vectors: Tensor) -> None:
        """Add one sequence's vectors ``[H, T, E]``."""
        vectors = vectors.to(self.sums)
        sums, squares = vectors.sum(1), vectors.mT @ vectors
        self.count += vectors.size(1)
        self.sums += sums
        self.squares += squares
        self.centred_squares += squares - sums[:, :, None] * sums[:, None, :] / vectors.size(1)

    @property
    def mean(self) -> Tensor:
        """The mean vector ``[H, E]``."""
        return self.sums / self.count

    @property
    def second(self) -> Tensor:
        """The second moment ``[H, E, E]``."""
        return self.squares / self.count

    @property
    def second_centred(self) -> Tensor:
        """The second moment of vectors from which the mean of their sequence was subtracted."""
        return self.centred_squares / self.count

    @property
    def covariance(self) -> Tensor:
        """The second moment of vectors from which the mean of all tokens was subtracted."""
        return self.second - self.mean[:, :, None] * self.mean[:, None, :]


class Cut(NamedTuple):
    """The best maps of every rank for the vectors of some heads: x ↦ mean + (x − mean)·down_r·up_r.

    The mean stays. For keys it changes a constant of each row, which matters only to activations that are not invariant to it.

    Args:
        energies: ``[H, E]``, S_j² in descending order.
        down: ``[H, E, E]``, whose first r columns are down_r.
        up: ``[H, E, E]``, whose first r rows are up_r.
        mean: ``[H, E]``.
    """

    energies: Tensor
    down: Tensor
    up: Tensor
    mean: Tensor

    def apply(self, vectors: Tensor, rank: int) -> Tensor:
        """Return the vectors ``[B, H, S, E]`` of every head, cut to a rank, in their own dtype. The maps stay in float32 or better."""
        dtype = torch.promote_types(vectors.dtype, torch.float32)
        parts = (self.down[..., :rank], self.up[:, :rank], self.mean[:, None])
        down, up, mean = (part.to(vectors.device, dtype) for part in parts)
        return (mean + (vectors.to(dtype) - mean) @ down @ up).to(vectors.dtype)


def truncate(queries: Tensor, keys: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return queries and keys of size rank + 1 whose products are the best approximation of rank ``rank`` of the logits.

    Each matrix of logits is cut by its own singular value decomposition, after its rows were centred. The last number of the new
    vectors is the constant of a row, which stays. The sizes are computed in float32 or better.

    Args:
        queries: ``[B, H, T, E]``.
        keys: ``[B, H, S, E]``.
    """
    dtype = torch.promote_types(queries.dtype, torch.float32)
    first, second = queries.to(dtype), keys.to(dtype)
    mean = second.mean(-2, keepdim=True)
    basis, triangle = torch.linalg.qr(second - mean)
    # logits = first · triangleᵀ · basisᵀ, and basis has orthonormal columns
    right = torch.linalg.svd(torch.linalg.qr(first).R @ triangle.mT)[2][..., :rank, :].mT
    ones = torch.ones_like(second[..., :1])
    cut = (torch.cat([first @ triangle.mT @ right, first @ mean.mT], -1), torch.cat([basis @ right, ones], -1))
    return cut[0].to(queries.dtype), cut[1].to(keys.dtype)


def energies(first: Tensor, second: Tensor) -> Tensor:
    """Return the energies ``[..., E]`` of the directions of two second moments ``[..., E, E]``, in descending order."""
    return torch.linalg.svdvals(_root(first)[0] @ _root(second)[0]).square()


def best_cut(first: Tensor, second: Tensor, mean: Tensor) -> Cut:
    """Return the best maps for vectors with second moment ``first``, compared with vectors with second moment ``second``.

    Args:
        first: ``[H, E, E]``.
        second: ``[H, E, E]``.
        mean: ``[H, E]``, which the maps keep.
    """
    root, inverse = _root(first)
    left, values, _ = torch.linalg.svd(root @ _root(second)[0])
    return Cut(values.square(), inverse @ left, left.mT @ root, mean)


def _root(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return C^½ and its pseudo-inverse."""
    values, vectors = torch.linalg.eigh(moment)
    kept = values > TOLERANCE * values[..., -1:].clamp_min(torch.finfo(values.dtype).tiny)
    roots = values.clamp_min(0).sqrt() * kept
    inverse = torch.where(kept, 1 / roots.clamp_min(torch.finfo(values.dtype).tiny), 0)
    return tuple((vectors * part[..., None, :]) @ vectors.mT for part in (roots, inverse))


def directions_for(found: Tensor, share: float) -> Tensor:
    """Return how many directions ``[...]`` hold a share of the energies ``[..., E]``; 0 where there is no energy."""
    cumulative = found.cumsum(-1)
    return (cumulative < share * cumulative[..., -1:]).sum(-1) + (cumulative[..., -1] > 0)


def last_quarter(found: Tensor, size: int) -> Tensor:
    """Return the share ``[...]`` of the energies ``[..., E]`` in the last quarter of ``size`` directions; 0.25 if all are equal."""
    return found[..., size - max(1, size // 4) : size].sum(-1) / found.sum(-1).clamp_min(1e-300)
