"""A call of the triton backend as launches of its kernels: tiles, grids, and memory for what they write."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2
from triton.language import bfloat16, constexpr, float16, float32

from fairseq_lowrank.ops.attention import kernels
from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.mask import AttentionMask, hiding_value
from fairseq_lowrank.ops.attention.mixing import HeadMixing, PositionwiseMixing, StaticMixing
from fairseq_lowrank.ops.attention.tree import empty_heads

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_DTYPES = {torch.float32: float32, torch.bfloat16: bfloat16, torch.float16: float16}


class Tile(NamedTuple):
    """Queries and keys of a tile, columns of the output that a program writes, its warps, and tiles in flight."""

    rows: int
    keys: int
    columns: int
    warps: int
    stages: int


class Kernel(NamedTuple):
    """A launch: its name, the function, how many programs, its arguments and the compiler's options."""

    name: str
    function: Any
    grid: tuple[int, int]
    arguments: tuple
    options: dict[str, Any]

    def run(self) -> object:
        """Launch the kernel. Return the compiled kernel, or ``None`` in Triton's interpreter."""
        return self.function[self.grid](*self.arguments, **self.options)


def tile_of(
    kernel: str, together: int, dim: int, value_dim: int, dtype: torch.dtype, dropout: bool, plain: bool
) -> Tile:
    """Return the tile of a kernel.

    Args:
        kernel: its name.
        together: heads of a program, padded.
        dim: size of a query's head, padded.
        value_dim: size of a value's head, padded.
        dtype: of the operation.
        dropout: whether weights are dropped.
        plain: whether scores go unmixed into a softmax, and no keys of padded heads meet a matrix for each query.
    """
    width = dim if kernel in ("query_gradients", "key_gradients") else value_dim
    if together == 1:
        # The derivative of sigsoftmax spills some of the registers of 4 warps.
        warps = 8 if kernel == "key_gradients" and not plain else 4
        return Tile(32, 32, min(width, 64), 4, 1) if dtype == torch.float32 else Tile(64, 32, width, warps, 1)
    # What a program adds up, H × rows × columns in float32, has to stay in 256 KiB of registers together with its operands, and
    # in the backward pass with the numbers that dropout draws.
    max_block = 32 if kernel in ("query_gradients", "key_gradients") and dropout else 64
    # A second tile in flight takes registers, which others need for the scores.
    backward = kernel in ("query_gradients", "key_gradients", "value_gradients")
    pipelined = backward and plain and together * max(dim, value_dim) <= 1024
    return Tile(16, 16, min(width, max_block * 16 // together), 8, 2 if pipelined else 1)


class Launch:
    """A call as what the kernels are given.

    Args:
        call: one that the triton backend can compute.
        seed: of dropout, below 2**62.
        run: launches a kernel.
    """

    def __init__(self, call: AttentionCall, seed: int, run: Callable[[Kernel], object] = Kernel.run) -> None:
        self.call, self.run = call, run
        self.batch, self.heads, self.queries, self.keys = call.scores.shape
        self.dtype = call.v.dtype
        self.q, self.k, self.v = (self._readable(tensor) for tensor in (call.dot_product.q, call.dot_product.k, call.v))
        self.scale = float(call.dot_product.factor)
        self.score_mixing, self.prob_mixing = (
            _matrix(call.score_mixing),
            _matrix(call.prob_mixing if call.mixes_weights else None),
        )
        self.mask: Any = _mask(call.mask, call.scores.shape)
        p = float(call.dropout_p)
        # Triton compiles a kernel for small numbers, for 1 and for multiples of 16 each. Seeds must not be of different kinds.
        self.seed = 2**62 + (2 * seed + 1) % 2**62
        self.dropout: Any = kernels.Dropout(self.seed, p, 1 / (1 - p)) if p else None
        self.empty = not (self.batch and self.queries and self.keys and self.v.size(3))

    def forward(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the heads, and return them with what the backward pass reads: the heads and the log-sum-exp of each row."""
        output = empty_heads(self.v, self.queries, self.heads, self.v.size(3))
        lse = self._row_numbers()
        if self.empty:
            return output.zero_(), (output, lse)
        q, k, v = map(_view, (self.q, self.k, self.v))
        self._launch("row_statistics", (q, k, self.scale, self.score_mixing, self.mask, lse))
        self._launch("attend", (*self._tensors(q, k, v, lse), _view(output)))
        return output, (output, lse)

    def backward(self, grad_output: Tensor, *kept: Tensor) -> list[Tensor | None]:
        """Compute the gradients of the call's tensors in their order; ``None`` for masks and for what needs none.

        ``kept`` is what :meth:`forward` returned next to the heads.
        """
        call = self.call
        needed = (
            call.dot_product.q,
            call.dot_product.k,
            call.v,
            *(mixing.weight for mixing in (call.score_mixing, call.prob_mixing) if mixing),
        )
        if self.empty:
            found: list[Tensor | None] = [torch.zeros_like(tensor) for tensor in needed]
        else:
            found = self._gradients(self._readable(grad_output), *kept)
        masks = [None for tensor in (call.mask.key_padding, call.mask.additive) if tensor is not None]
        gradients = [
            gradient.to(tensor.dtype) if tensor.requires_grad and gradient is not None else None
            for tensor, gradient in zip(needed, found, strict=True)
        ]
        return [*gradients[:3], *masks, *gradients[3:]]

    def _gradients(self, grad_output: Tensor, output: Tensor, lse: Tensor) -> list[Tensor | None]:
        call, dim = self.call, self.q.size(3)
        q, k, v, grad = map(_view, (self.q, self.k, self.v, grad_output))
        arguments = (*self._tensors(q, k, v, lse), grad)
        of_mixing: list[Tensor | None] = []
        if call.mixes_weights:
            sums = self._row_numbers()
            gradient, view = self._matrix_gradient("row_sums", call.prob_mixing)
            self._launch("row_sums", (*arguments, sums, view))
            assert gradient is not None
            of_mixing = [gradient if gradient.dim() == 4 else gradient.sum(dim=0)]
        else:
            # Σ_s P_s dP_s = Σ_s P_s do·v_s, with dropout too
            sums = torch.linalg.vecdot(grad_output.float(), output.float()).contiguous()
        arguments = (*arguments, sums)
        of_scores, view = self._matrix_gradient("query_gradients", call.score_mixing)
        grad_q = grad_k = grad_v = None
        if call.dot_product.q.requires_grad or call.score_mixing is not None:
            grad_q = empty_heads(self.q, self.queries, self.heads, dim)
            self._launch("query_gradients", (*arguments, _view(grad_q), view))
        if call.dot_product.k.requires_grad:
            grad_k = self._key_gradient(arguments, self.k)
        if call.v.requires_grad:
            grad_v = self._key_gradient(arguments, self.v)
        of_score_mixing = [] if of_scores is None else [of_scores.sum(dim=0)]
        return [grad_q, grad_k, grad_v, *of_score_mixing, *of_mixing]

    def _key_gradient(self, arguments: tuple, of: Tensor) -> Tensor:
        """Compute the gradient of keys or values ``[B, G, S, D]``, added up in float32 over heads that share them."""
        groups, dim = of.size(1), of.size(3)
        like = of if groups == self.heads else of.new_empty(0, dtype=torch.float32).expand(self.batch, -1)
        result = empty_heads(like, self.keys, self.heads, dim)
        self._launch("key_gradients" if of is self.k else "value_gradients", (*arguments, _view(result)))
        return result if groups == self.heads else result.unflatten(1, (groups, -1)).sum(dim=2)

    def _launch(self, name: str, arguments: tuple) -> None:
        function = kernels.key_gradients if name == "value_gradients" else getattr(kernels, name)
        shape, tile = self._shape(name)
        by_keys = name in ("key_gradients", "value_gradients")
        rows, count = (shape.BLOCK_N, self.keys) if by_keys else (shape.BLOCK_M, self.queries)
        columns = {"query_gradients": self.q, "key_gradients": self.k, "attend": self.v, "value_gradients": self.v}
        width = columns[name].size(3) if name in columns else 1
        programs = cdiv(count, rows.value) * self.batch * (self.heads if shape.BLOCK_H == 1 else 1)
        grid = (programs, cdiv(width, shape.BLOCK_OUT.value))
        further = (constexpr(name == "key_gradients"),) if by_keys else ()
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
        if name == "row_sums":
            # Unasked, ptxas spills those beyond half of all registers, for which an SM could hold another program.
            options["maxnreg"] = 255
        self.run(Kernel(name, function, grid, (*arguments, shape, *further), options))

    def _shape(self, name: str) -> tuple[kernels.Shape, Tile]:
        meets = self.call.score_mixing is not None or (self.call.mixes_weights and name != "row_statistics")
        together = max(16, next_power_of_2(self.heads)) if meets else 1
        dims = self.q.size(3), self.v.size(3)
        padded = [max(16, next_power_of_2(dim)) for dim in dims]
        plain = self.call.score_mixing is None and self.call.activation == "softmax"
        positionwise = isinstance(self.call.prob_mixing, PositionwiseMixing)
        plain = plain and not (name == "key_gradients" and positionwise and self.heads < together)
        tile = tile_of(name, together, padded[0], padded[1], self.dtype, self.dropout is not None, plain)
        exact = self.dtype != torch.float32 or not torch.backends.cuda.matmul.allow_tf32
        numbers = (self.heads, together, tile.rows, tile.keys, dims[0], padded[0], dims[1], padded[1], tile.columns)
        groups = self.k.size(1), self.v.size(1)
        further = (self.call.activation == "sigsoftmax", _DTYPES[self.dtype], "ieee" if exact else "tf32", _INTERPRETED)
        wide = any(map(_is_wide, (self.q, self.k, self.v)))
        return kernels.Shape(*map(constexpr, (*numbers, *groups, *further, wide))), tile

    def _tensors(self, q: kernels.View, k: kernels.View, v: kernels.View, lse: Tensor) -> tuple:
        return q, k, v, self.scale, self.score_mixing, self.prob_mixing, self.mask, self.dropout, lse

    def _matrix_gradient(self, kernel: str, mixing: HeadMixing | None) -> tuple[Tensor | None, kernels.Matrix]:
        """Return memory for the gradient of M: for each query if it is position-wise, else a part from each program."""
        if mixing is None or mixing.head_scale is not None:
            return None, _matrix(None)
        if not isinstance(mixing, StaticMixing):
            gradient = torch.empty_like(mixing.weight, memory_format=torch.contiguous_format)
            return gradient, _positionwise(gradient)
        programs = cdiv(self.queries, self._shape(kernel)[0].BLOCK_M.value) * self.batch
        gradient = torch.empty(programs, self.heads, self.heads, dtype=torch.float32, device=self.v.device)
        program, row, column = gradient.stride()
        return gradient, kernels.Matrix(gradient, 0, program, row, column, kernels.STATIC)

    def _row_numbers(self) -> Tensor:
        return torch.empty(self.batch, self.heads, self.queries, dtype=torch.float32, device=self.v.device)

    def _readable(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.dtype)
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _is_wide(tensor: Tensor) -> bool:
    """Return True if the heads of a batch entry ``[B, H, N, D]`` may be further apart than a 32-bit offset."""
    return tensor.size(1) * tensor.stride(1) >= 2**31 - 2**24


def _view(tensor: Tensor) -> kernels.View:
    return kernels.View(tensor, *tensor.stride()[:3])


def _matrix(mixing: HeadMixing | None) -> kernels.Matrix:
    if mixing is None:
        return kernels.Matrix(None, 0, 0, 0, 0, kernels.NONE)
    if isinstance(mixing, StaticMixing):
        row, column = mixing.weight.stride()
        return kernels.Matrix(mixing.weight, 0, 0, row, column, kernels.STATIC)
    return _positionwise(mixing.weight)


def _positionwise(weight: Tensor) -> kernels.Matrix:
    batch, position, row, column = weight.stride()
    return kernels.Matrix(weight, batch, position, row, column, kernels.POSITIONWISE)


def _mask(mask: AttentionMask, scores: tuple[int, int, int, int]) -> kernels.Mask:
    _, _, queries, keys = scores
    positions, offset = mask.visible_prefix(queries, keys)
    causal = kernels.NOT_CAUSAL
    if mask.causal:
        causal = kernels.CAUSAL_REPEATED if mask.num_appended_keys or mask.query_repeats > 1 else kernels.CAUSAL
    padding = None if mask.key_padding is None else mask.key_padding.contiguous().view(torch.uint8)
    additive, hides_from = None, None
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask.additive is not None:
        additive = mask.additive.expand(scores)
        strides = additive.stride()
        if additive.dtype == torch.bool:
            additive = additive.view(torch.uint8)
        else:
            hides_from = hiding_value(additive.dtype)
    return kernels.Mask(
        queries,
        keys,
        positions,
        offset,
        mask.num_appended_keys,
        causal,
        padding,
        additive,
        *strides,
        hides_from,  # type: ignore[call-arg]
    )
