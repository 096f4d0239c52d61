"""Scores: what queries and keys make of each other, before mixing, masks and activation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from fairseq_lowrank.ops.activation import at_least_float32
from fairseq_lowrank.ops.attention.blocks import Block, KeyGradient, Workspace, group_queries
from fairseq_lowrank.ops.attention.mask import select_head
from fairseq_lowrank.ops.attention.tree import TensorTree, empty_heads, is_traced


class ScoreBlocks(Protocol):
    """Scores of one block after the other in a workspace, and their gradients summed over blocks."""

    def forward(self, block: Block, out: Tensor) -> None:
        """Write the scores ``[b, H, rows, keys]`` into ``out``."""

    def backward(self, block: Block, grad: Tensor) -> None:
        """Add what the gradient ``[b, H, rows, keys]`` of a block's scores makes of the tensors' gradients."""

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of the tensors in their order. Blocks that see no key were left out."""


class Scores(Protocol):
    """What every kind of scores offers; it is a :class:`~.tree.TensorTree` too."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``[B, H, T, S]``"""

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply ``change`` to every tensor, see :meth:`.TensorTree.map_tensors`."""

    def check(self) -> None:
        """Raise ``ValueError`` where the tensors do not fit together."""

    def dense(self) -> Tensor:
        """Compute the formula, ``[B, H, T, S]``, in float32 or better."""

    def select_head(self, batch: slice, head: int, column: Tensor | None = None) -> Scores:
        """Return the scores of one head for some batch entries, with H = 1; nothing of size T×S is made.

        With a ``column`` broadcastable to ``[b, H, T, 1]`` they are Σ_j column[j] S_j.
        """

    def blocks(self, work: Workspace) -> ScoreBlocks:
        """Return the scores of blocks for the blocked backend."""


@dataclass(frozen=True)
class DotProduct(TensorTree):
    """scale · q_i k_gᵀ with g = ⌊i·G/H⌋: groups of heads share a key, which is never expanded.

    Args:
        q: ``[B, H, T, D]`` queries.
        k: ``[B, G, S, D]`` keys; G divides H.
        scale: by default 1/√D.
    """

    q: Tensor
    k: Tensor
    scale: float | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, queries, _ = self.q.shape
        return batch, heads, queries, self.k.size(2)

    @property
    def factor(self) -> float:
        return self.q.size(-1) ** -0.5 if self.scale is None else self.scale

    def check(self) -> None:
        q, k = self.q, self.k
        if q.dim() != 4 or k.dim() != 4:
            raise ValueError(f"q, k of shapes {list(q.shape)}, {list(k.shape)}: expected [B, H, T, D], [B, G, S, D]")
        for name, tensor in (("q", q), ("k", k)):
            if not tensor.is_floating_point():
                raise ValueError(f"{name} of {tensor.dtype}: expected a float tensor")
        batch, heads, _, dim = q.shape
        if heads < 1 or dim < 1:
            raise ValueError(f"q of shape {list(q.shape)}: expected [B, H, T, D] with H and D of 1 or more")
        key_batch, groups, _, key_dim = k.shape
        if groups < 1 or heads % groups or key_batch != batch or key_dim != dim:
            raise ValueError(
                f"k of shape {list(k.shape)} does not fit q {list(q.shape)}: expected [B, G, S, D] = [{batch}, G, S, {dim}], G dividing {heads}"
            )
        if not is_traced(q) and not (isinstance(self.factor, (int, float)) and math.isfinite(self.factor)):
            raise ValueError(f"scale={self.scale!r}: expected a finite number")

    def dense(self) -> Tensor:
        return at_least_float32(grouped_product(self.q * self.factor, self.k.mT))

    def select_head(self, batch: slice, head: int, column: Tensor | None = None) -> DotProduct:
        return DotProduct(*head_queries_and_keys(self.q[batch], self.k[batch], head, column), self.factor)

    def blocks(self, work: Workspace) -> _DotProductBlocks:
        return _DotProductBlocks(self, work)


class _DotProductBlocks:
    def __init__(self, scores: DotProduct, work: Workspace) -> None:
        self.q, self.k, self.scale, self.work = scores.q, scores.k, scores.factor, work
        self.groups = scores.k.size(1)
        self._grad_q: Tensor | None = None

    def forward(self, block: Block, out: Tensor) -> None:
        keys = self.work.keys(self.k, block).transpose(1, 2)
        self.work.product(self._queries(block), keys, group_queries(out, self.groups), self.scale)

    def backward(self, block: Block, grad: Tensor) -> None:
        if self._grad_q is None:
            q = self.q
            # Zero where a block sees no key.
            self._grad_q = empty_heads(q, q.size(2), q.size(1), q.size(3)).zero_()
            self._grad_k = KeyGradient(self.k, self.work)
        shape, grad = grad.shape, group_queries(grad, self.groups)
        self._grad_k.add(block, self._queries(block), grad, self.scale)
        heads = self.work.product(grad, self.work.keys(self.k, block), scale=self.scale)
        self._grad_q[block.batch, :, block.rows] = heads.reshape(*shape[:3], -1)

    def gradients(self) -> list[Tensor | None]:
        if self._grad_q is None:
            return [torch.zeros_like(self.q), torch.zeros_like(self.k)]
        return [self._grad_q, self._grad_k.result()]

    def _queries(self, block: Block) -> Tensor:
        return group_queries(self.q[block.batch, :, block.rows], self.groups)


def head_queries_and_keys(q: Tensor, k: Tensor, head: int, column: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return queries ``[b, H, T, D]`` and keys ``[b, G, S, D]`` of one head, or such as make Σ_j column[j] q_j k_gᵀ."""
    heads, groups = q.size(1), k.size(1)
    if column is None:
        return select_head(q, slice(None), head), select_head(k, slice(None), head * groups // heads)
    # Σ_j c_j q_j k_gᵀ is one product: of queries added up within groups, groups side by side.
    q = (q * column).unflatten(1, (groups, -1)).sum(dim=2)
    q, k = (tensor.transpose(1, 2).flatten(2)[:, None] for tensor in (q, k))
    return q, k


def grouped_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left_i @ right_g with g = ⌊i·G/H⌋ of ``left [B, H, N, D]`` and ``right [B, G, D, M]``: ``[B, H, N, M]``."""
    if left.size(1) == right.size(1):  # fewer calls than below, and the same product
        return left @ right
    batch, heads, rows, dim = left.shape
    right_batch, groups, _, columns = right.shape
    if right_batch != batch:
        right = right.expand(batch, -1, -1, -1)
    left = left.reshape(batch * groups, heads // groups * rows, dim)
    return torch.bmm(left, right.flatten(0, 1)).view(batch, heads, rows, columns)
