"""Scores that no key takes part in: those of the random synthesizer (Tay et al. 2020, arXiv 2005.00743).

Those of the dense synthesizer, ReLU(x_t W_1 + b_1) W_2 + b_2, are :class:`~.scores.DotProduct` of the hidden features and of the
columns of W_2 in place of the keys: a learned key for each position, the same in every sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_lowrank.ops.activation import at_least_float32
from fairseq_lowrank.ops.attention.blocks import Block, Workspace, slice_block
from fairseq_lowrank.ops.attention.mask import select_head
from fairseq_lowrank.ops.attention.tree import TensorTree


@dataclass(frozen=True)
class RandomSynthesizer(TensorTree):
    """R[t, s]: a number for each pair of positions, which is learned and has nothing to do with what stands there.

    Args:
        weight: ``[H, T, S]``, the rows and columns of R for these queries and keys; ``[B, H, T, S]`` where the entries of a batch
            count their positions differently.
        batch: B.
    """

    weight: Tensor
    batch: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, *self.weight.shape[-3:])

    def check(self) -> None:
        if self.weight.dim() not in (3, 4) or self.weight.shape[:-3] not in ((), (self.batch,)):
            raise ValueError(
                f"weight of shape {list(self.weight.shape)}: expected [H, T, S] or [{self.batch}, H, T, S] of the random synthesizer"
            )
        if not self.weight.is_floating_point():
            raise ValueError(f"weight of {self.weight.dtype}: expected a float tensor")

    def dense(self) -> Tensor:
        return at_least_float32(self.weight).expand(self.shape)

    def select_head(self, batch: slice, head: int, column: Tensor | None = None) -> RandomSynthesizer:
        entries = len(range(self.batch)[batch])
        if column is None:
            return RandomSynthesizer(select_head(self.weight, batch, head), entries)
        # As large as the part of R for one head; more only where a column differs between the entries of the batch.
        weight = self.weight[batch] if self.weight.dim() == 4 else self.weight
        return RandomSynthesizer((weight * column).sum(dim=-3, keepdim=True), entries)

    def blocks(self, work: Workspace) -> _RandomBlocks:
        return _RandomBlocks(self.weight, work)


class _RandomBlocks:
    def __init__(self, weight: Tensor, work: Workspace) -> None:
        self.weight = weight
        self._sum = torch.zeros_like(weight, dtype=work.dtype) if weight.requires_grad else None

    def forward(self, block: Block, out: Tensor) -> None:
        out.copy_(slice_block(self.weight, block))

    def backward(self, block: Block, grad: Tensor) -> None:
        if self._sum is not None:
            part = slice_block(self._sum, block)
            part += grad.sum_to_size(part.shape)

    def gradients(self) -> list[Tensor | None]:
        return [None if self._sum is None else self._sum.to(self.weight.dtype)]
