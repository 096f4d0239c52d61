"""Scores of content and of relative position (Transformer-XL, Dai et al. 2019, arXiv 1901.02860, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_lowrank.ops.activation import at_least_float32
from fairseq_lowrank.ops.attention.blocks import Block, Workspace
from fairseq_lowrank.ops.attention.scores import DotProduct, ScoreBlocks, grouped_product, head_queries_and_keys
from fairseq_lowrank.ops.attention.tree import TensorTree, empty_heads


@dataclass(frozen=True)
class Relative(TensorTree):
    """scale · (q_t k_sᵀ + p_t r_{δ}ᵀ), δ = t + S − T − s: what a query makes of a key, and of how far before it the key is.

    In Transformer-XL q_t is the query plus u, p_t the query plus v. The last query has the position of the last key,
    as in cached decoding and with a memory of earlier segments.

    Args:
        content: q_t k_sᵀ and the scale.
        p: ``[B, H, T, D]`` queries of positions.
        positions: ``[1, G, N, D]``, r of the distances S − 1, S − 2, …, S − N; G divides H. S of them suffice where causality
            hides the keys after a query, and S + T − 1 are all there are: to a key further on there is no second term.
    """

    content: DotProduct
    p: Tensor
    positions: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.content.shape

    def check(self) -> None:
        self.content.check()
        batch, heads, queries, keys = self.shape
        p, positions = self.p, self.positions
        if p.dim() != 4 or p.shape[:3] != (batch, heads, queries) or not p.is_floating_point():
            raise ValueError(
                f"p of shape {list(p.shape)} and {p.dtype}: expected floats [{batch}, {heads}, {queries}, D], like q"
            )
        groups, dim = positions.size(1) if positions.dim() == 4 else 0, p.size(3)
        if groups < 1 or heads % groups or positions.shape != (1, groups, positions.size(2), dim):
            raise ValueError(
                f"positions of shape {list(positions.shape)}: expected [1, G, N, {dim}], G dividing {heads}"
            )
        if not keys <= positions.size(2) <= max(keys + queries - 1, keys):
            raise ValueError(
                f"positions of {positions.size(2)} distances: expected {keys} to {keys + queries - 1} for {queries} queries "
                f"and {keys} keys"
            )

    def dense(self) -> Tensor:
        products = grouped_product(self.p * self.content.factor, self.positions.transpose(-1, -2))
        return self.content.dense() + _shifted(at_least_float32(products), self.shape[3])

    def select_head(self, batch: slice, head: int, column: Tensor | None = None) -> Relative:
        p, positions = head_queries_and_keys(self.p[batch], self.positions, head, column)
        return Relative(self.content.select_head(batch, head, column), p, positions)

    def blocks(self, work: Workspace) -> _RelativeBlocks:
        return _RelativeBlocks(self, work)


def _shifted(products: Tensor, keys: int) -> Tensor:
    """Return ``[B, H, T, S]`` by key from ``[B, H, T, N]`` by distance S − 1 − n: row t moves T − 1 − t to the left."""
    queries = products.size(2)
    if queries == 0 or keys == 0:
        return products[..., :keys]
    width = keys + queries
    padded = F.pad(products, (0, width - products.size(3))).flatten(2)
    # Read in rows that are shorter by one, each begins one further to the left.
    rows = padded[..., queries - 1 : queries - 1 + queries * (width - 1)].unflatten(2, (queries, width - 1))
    return rows[..., :keys]


class _RelativeBlocks:
    """Content as dot products; positions as one product of a block's queries, of all batch entries, with the distances that
    occur in the block, read along its diagonals."""

    def __init__(self, scores: Relative, work: Workspace) -> None:
        self.content: ScoreBlocks = scores.content.blocks(work)
        self.p, self.positions, self.scale, self.work = scores.p, scores.positions, scores.content.factor, work
        self._all_positions = scores.positions.to(work.product_dtype)
        self.groups, self.queries = scores.positions.size(1), scores.shape[2]
        self._grad_p: Tensor | None = None

    def forward(self, block: Block, out: Tensor) -> None:
        self.content.forward(block, out)
        products, distances = self._buffer(block)
        near = products[..., : distances.stop - distances.start]
        self.work.product(self._rows(block), self._block_positions(distances), near, self.scale)
        products[..., near.size(2) :] = 0
        out.unflatten(1, (self.groups, -1)).add_(self._diagonals(products, block))

    def backward(self, block: Block, grad: Tensor) -> None:
        if self._grad_p is None:
            p = self.p
            # Zero where a block sees no key.
            self._grad_p = empty_heads(p, p.size(2), p.size(1), p.size(3)).zero_()
            shape = self.groups, p.size(3), self.positions.size(2)
            self._grad_positions = self.positions.new_zeros(shape, dtype=self.work.dtype)
        products, distances = self._buffer(block)
        products.zero_()
        self._diagonals(products, block).copy_(grad.unflatten(1, (self.groups, -1)))
        near = products[..., : distances.stop - distances.start]
        rows = self._rows(block)
        self._grad_positions[..., distances] += self.work.product(rows.transpose(1, 2), near, scale=self.scale)
        heads = self.work.product(near, self._block_positions(distances).transpose(1, 2), scale=self.scale)
        batch, _, queries, _ = grad.shape
        heads = heads.reshape(self.groups, batch, -1, queries, heads.size(2)).transpose(0, 1)
        self._grad_p[block.batch, :, block.rows] = heads.flatten(1, 2)
        self.content.backward(block, grad)

    def gradients(self) -> list[Tensor | None]:
        if self._grad_p is None:
            return [*self.content.gradients(), torch.zeros_like(self.p), torch.zeros_like(self.positions)]
        positions = self._grad_positions.transpose(1, 2)[None].to(self.positions.dtype)
        return [*self.content.gradients(), self._grad_p, positions]

    def _rows(self, block: Block) -> Tensor:
        """Return the queries of a block, ``[G, b·(H/G)·rows, D]``."""
        p = self.p[block.batch, :, block.rows].unflatten(1, (self.groups, -1))
        return p.transpose(0, 1).flatten(1, 3)

    def _block_positions(self, distances: slice) -> Tensor:
        """Return the positions of these distances, ``[G, D, n]``."""
        return self._all_positions[0, :, distances].transpose(1, 2)

    def _buffer(self, block: Block) -> tuple[Tensor, slice]:
        """Return memory ``[G, b·(H/G)·rows, rows + keys − 1]`` for the distances between a block's queries and keys.

        Also return the slice of those distances that have positions.
        """
        rows, batch = block.rows.stop - block.rows.start, block.batch.stop - block.batch.start
        width, count = rows + block.num_keys - 1, self.positions.size(2)
        start = min(self.queries - block.rows.stop + block.keys.start, count)
        heads = self.p.size(1) // self.groups
        products = self.work.buffer("positions", self.groups, batch * heads * rows, width)
        return products, slice(start, min(start + width, count))

    def _diagonals(self, products: Tensor, block: Block) -> Tensor:
        """Return a view ``[b, G, H/G, rows, keys]``: of the products with all distances, those of each query with each key."""
        rows, batch = block.rows.stop - block.rows.start, block.batch.stop - block.batch.start
        heads, width = self.p.size(1) // self.groups, products.size(2)
        whole = products.view(self.groups, batch, heads, rows, width).transpose(0, 1)
        strides = (*whole.stride()[:3], width - 1, 1)
        return whole.as_strided((*whole.shape[:4], block.num_keys), strides, whole.storage_offset() + rows - 1)
