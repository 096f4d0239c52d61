"""Mixing of heads: of scores before the softmax, of probabilities after it. P̄_i = Σ_j M[j, i] P_j."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_lowrank.ops.activation import at_least_float32, without_autocast
from fairseq_lowrank.ops.attention.blocks import Block
from fairseq_lowrank.ops.attention.tree import TensorTree, is_traced

Out = Callable[..., Tensor]
"""Of a shape, memory to write into."""


class HeadMixing(TensorTree):
    """A rule, whose fields are the tensors that it reads.

    For the blocked backend it says ``blocks()``: an object with ``mix(heads, block, out)``, the mixed heads
    ``[b, H, rows, keys]``, with ``backward(heads, grad, block, out)``, the gradient of the heads and, where they come for
    nothing, Σ_s heads ∘ gradient ``[b, H, rows, 1]``, and with ``gradients()``, those of the fields, summed over blocks.
    """

    weight: Tensor
    max_block_elements: int | None = None
    """A limit of the scores of a block of several batch entries."""

    @property
    def head_scale(self) -> Tensor | None:
        """``[H, 1, 1]`` where mixing probabilities is only this factor of each head's output: nothing has to be mixed."""
        return None

    def mixing_matrix(self) -> Tensor:
        """Return M as ``[H, H]``, or ``[B, T, H, H]`` (indices b, t, j, i) if each query has its own, in float32 or better."""
        raise NotImplementedError

    def blocks(self) -> Any:
        """Return the mixing of blocks for the blocked backend, see :class:`HeadMixing`."""
        raise NotImplementedError

    def check(self, scores: tuple[int, int, int, int]) -> None:
        """Raise ``ValueError`` where it does not fit scores ``[B, H, T, S]``."""
        raise NotImplementedError

    def mix_heads(self, heads: Tensor) -> Tensor:
        """Return the formula Σ_j M_t[j, i] P_j[t] for P ``[B, H, T, S]`` (Mixhead paper, eq. 12)."""
        matrices = self.mixing_matrix()
        if matrices.dtype != heads.dtype:
            matrices = matrices.to(heads.dtype)
        with without_autocast(heads):
            if matrices.dim() == 4:
                # In [T, B, H, .], the order in which a layer projects queries, only the heads are copied.
                return (matrices.permute(1, 0, 3, 2) @ heads.permute(2, 0, 1, 3)).permute(1, 2, 0, 3)
            return torch.bmm(matrices.t().expand(heads.size(0), -1, -1), heads.flatten(2)).view_as(heads)

    def column(self, batch: slice, head: int) -> Tensor:
        """Return M[:, i] of one mixed head, broadcastable to ``[b, H, T, 1]``."""
        matrices = self.mixing_matrix()
        if matrices.dim() == 2:
            return matrices[:, head, None, None]
        return matrices[batch, :, :, head].transpose(1, 2)[..., None]


@dataclass(frozen=True)
class StaticMixing(HeadMixing):
    """One M ``[H, H]`` for all queries."""

    weight: Tensor

    def mixing_matrix(self) -> Tensor:
        return at_least_float32(self.weight)

    def check(self, scores: tuple[int, int, int, int]) -> None:
        check_shape("weight of static mixing", self.weight, "[H, H]", (scores[1],) * 2)

    def blocks(self) -> _StaticBlocks:
        return _StaticBlocks(self.weight)


class _StaticBlocks:
    """A product of H×H with H×(rows·keys)."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.matrix = weight, at_least_float32(weight)
        self.gradient = torch.zeros_like(self.matrix) if weight.requires_grad else None

    def mix(self, heads: Tensor, block: Block, out: Out) -> Tensor:
        return self._multiply(self.matrix.t(), heads, out)

    def backward(self, heads: Tensor, grad: Tensor, block: Block, out: Out) -> tuple[Tensor, None]:
        if self.gradient is not None:
            if heads.is_cuda:
                self.gradient += _products_by_query(heads, grad).sum(dim=0)
            elif heads.size(0) == 1:  # on a CPU half the time of a batch of one
                self.gradient += torch.mm(heads[0].flatten(1), grad[0].flatten(1).t())
            else:
                self.gradient += torch.bmm(heads.flatten(2), grad.flatten(2).transpose(1, 2)).sum(dim=0)
        return self._multiply(self.matrix, grad, out), None

    def gradients(self) -> list[Tensor | None]:
        return [None if self.gradient is None else self.gradient.to(self.weight.dtype)]

    def _multiply(self, matrix: Tensor, heads: Tensor, out: Out) -> Tensor:
        mixed = out(*heads.shape)
        torch.bmm(matrix.to(heads.dtype).expand(heads.size(0), -1, -1), heads.flatten(2), out=mixed.flatten(2))
        return mixed


@dataclass(frozen=True)
class PositionwiseMixing(HeadMixing):
    """M_t ``[B, T, H, H]`` for each query (indices b, t, j, i), see :meth:`of_queries`."""

    weight: Tensor

    # The queries of several batch entries are copied into one order: that pays only for the smallest of blocks.
    max_block_elements = 1 << 16

    @classmethod
    def of_queries(cls, query: Tensor, query_weight: Tensor, base: Tensor) -> PositionwiseMixing:
        """Compute M_t[j, i] = Σ_d q_{t,j,d} W^M[d, i] + B[j, i] (Mixhead paper, section 3.1), in float32 or better.

        Args:
            query: ``[B, H, T, D]`` queries, after any head embedding, before the scale and before anything is folded in.
            query_weight: ``[D, H]``, W^M.
            base: ``[H, H]``, B.
        """
        with without_autocast(query):
            # In [T, B, H, D], the order in which a layer projects queries, the product copies nothing.
            query_weight, base = at_least_float32(query_weight), at_least_float32(base)
            return cls((_wide_product(query.permute(2, 0, 1, 3), query_weight) + base).transpose(0, 1))

    def mixing_matrix(self) -> Tensor:
        return at_least_float32(self.weight)

    def check(self, scores: tuple[int, int, int, int]) -> None:
        batch, heads, queries, _ = scores
        check_shape("weight of position-wise mixing", self.weight, "[B, T, H, H]", (batch, queries, heads, heads))

    def blocks(self) -> _PositionwiseBlocks:
        return _PositionwiseBlocks(self.weight)


class _PositionwiseBlocks:
    """For each query a product of H×H with H×keys."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.matrices = weight, at_least_float32(weight)
        self.gradient: Tensor | None = None

    def mix(self, heads: Tensor, block: Block, out: Out) -> Tensor:
        return self._multiply(self._block_matrices(block).transpose(1, 2), heads, out)

    def backward(self, heads: Tensor, grad: Tensor, block: Block, out: Out) -> tuple[Tensor, Tensor]:
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.matrices)  # zero where a whole block sees no key
        batch, num_heads, rows, _ = heads.shape
        matrices, gradient = self._block_matrices(block), _products_by_query(heads, grad)
        self.gradient[block.batch, block.rows] = gradient.view(batch, rows, num_heads, num_heads)
        # Σ_s P_j dP_j = Σ_i M[j, i] Σ_s P_j dP̄_i, and the inner sum is the gradient of M.
        sums = (matrices * gradient).sum(dim=-1).view(batch, rows, num_heads, 1).transpose(1, 2)
        return self._multiply(matrices, grad, out), sums

    def gradients(self) -> list[Tensor | None]:
        return [torch.zeros_like(self.weight) if self.gradient is None else self.gradient.to(self.weight.dtype)]

    def _block_matrices(self, block: Block) -> Tensor:
        return self.matrices[block.batch, block.rows].flatten(0, 1)

    def _multiply(self, matrices: Tensor, heads: Tensor, out: Out) -> Tensor:
        by_query = heads.transpose(1, 2)
        mixed = out(*by_query.shape)
        torch.bmm(matrices, _rows(by_query), out=mixed.flatten(0, 1))
        return mixed.transpose(1, 2)


@dataclass(frozen=True)
class DiagonalMixing(HeadMixing):
    """w ``[H]``, the diagonal of an M that is 0 elsewhere: each head is only scaled, P̄_i = w_i P_i."""

    weight: Tensor

    @property
    def head_scale(self) -> Tensor:
        """(w_i P_i) V = w_i (P_i V), with dropout too."""
        return self.weight[:, None, None]

    def mixing_matrix(self) -> Tensor:
        return torch.diag(at_least_float32(self.weight))

    def check(self, scores: tuple[int, int, int, int]) -> None:
        check_shape("weight of diagonal mixing", self.weight, "[H]", scores[1:2])

    def blocks(self) -> _DiagonalBlocks:
        return _DiagonalBlocks(self.weight)


class _DiagonalBlocks:
    def __init__(self, weight: Tensor) -> None:
        self.weight, self.scale = weight, at_least_float32(weight)[:, None, None]
        self.gradient = torch.zeros_like(self.scale)

    def mix(self, heads: Tensor, block: Block, out: Out) -> Tensor:
        return torch.mul(heads, self.scale, out=out(*heads.shape))

    def backward(self, heads: Tensor, grad: Tensor, block: Block, out: Out) -> tuple[Tensor, None]:
        self.gradient += (heads * grad).sum(dim=(0, 2, 3))[:, None, None]
        return torch.mul(grad, self.scale, out=out(*grad.shape)), None

    def gradients(self) -> list[Tensor | None]:
        return [self.gradient.flatten().to(self.weight.dtype)]


def _wide_product(queries: Tensor, weight: Tensor) -> Tensor:
    """Return ``queries [..., D] @ weight [D, H]`` in float32 or better. Autograd keeps the queries in their original dtype."""
    wide = at_least_float32(queries)
    if wide is queries or is_traced(queries):  # a compiler chooses itself what it keeps
        return wide @ weight
    return _WideProduct.apply(queries, weight)


class _WideProduct(torch.autograd.Function):
    """The queries are widened once more for the gradient of the weight: a copy of twice their size is not kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(queries: Tensor, weight: Tensor) -> Tensor:
        return at_least_float32(queries) @ weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (queries, weight), (of_queries, of_weight) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            (grad @ weight.t()).to(queries.dtype) if of_queries else None,
            at_least_float32(queries).flatten(0, -2).t() @ grad.flatten(0, -2) if of_weight else None,
        )

    @staticmethod
    def jvp(ctx: Any, queries_tangent: Tensor, weight_tangent: Tensor) -> Tensor:
        queries, weight = ctx.saved_tensors
        return at_least_float32(queries_tangent) @ weight + at_least_float32(queries) @ weight_tangent


def _products_by_query(heads: Tensor, grad: Tensor) -> Tensor:
    """Return P[b, :, t] dP̄[b, :, t]ᵀ of each query, ``[B·rows, H, H]``. Their sum over queries is the gradient of one M.

    On a GPU the sum takes this way. One product with such short sides, over all weights of a block, was slow there for long
    sequences (docs/log.md).
    """
    return torch.bmm(_rows(heads.transpose(1, 2)), _rows(grad.transpose(1, 2)).transpose(1, 2))


def _rows(by_query: Tensor) -> Tensor:
    """Reshape ``[B, rows, H, keys]`` to ``[B·rows, H, keys]``: a view where B is 1, so that nothing is copied."""
    return by_query.reshape(-1, *by_query.shape[2:])


def check_shape(name: str, tensor: Tensor, letters: str, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name}: {list(tensor.shape)}, expected {letters} = {list(shape)}")
