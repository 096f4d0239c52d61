"""A call of the tiled backend as launches of its kernels: tiles, grids, and memory for what they write."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2
from triton.language import constexpr

from fairseq_lowrank.ops.attention import kernels, tiled_kernels
from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.launch import _DTYPES, Kernel, Launch, _is_wide, _matrix, _view
from fairseq_lowrank.ops.attention.mask import AttentionMask
from fairseq_lowrank.ops.attention.mixing import PositionwiseMixing
from fairseq_lowrank.ops.attention.padding import is_right_padding
from fairseq_lowrank.ops.attention.tree import empty_heads

PROGRAMS = 128
"""A GPU has about so many multiprocessors (an H100 132): fewer programs take smaller tiles."""
LOG2_E = 1 / math.log(2)


class Tile(NamedTuple):
    """Queries and keys of a tile, its warps, and tiles in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


def tile_of(kernel: str, together: int, dim: int, few: bool, positionwise: bool = False) -> Tile:
    """Return the tile of a kernel.

    Args:
        kernel: its name.
        together: heads of a program, padded.
        dim: the larger size of a head, padded.
        few: whether large tiles would leave multiprocessors idle.
        positionwise: whether each query has a matrix.
    """
    by_query, by_key = kernel in ("row_sums", "query_gradients"), kernel in ("key_gradients", "value_gradients")
    if together == 1:
        if dim <= 64 or kernel in ("statistics", "averages"):
            return Tile(64, 64, 4, 1 if by_query else 2)
        return Tile(32, 64, 4, 1) if by_key else Tile(64, 32, 4, 2)
    # What a program accumulates, heads × block × columns in float32, takes half of the registers at most, and the scores of a
    # tile a part of the others. So each byte that is read serves as many rows as can be.
    small = by_query or (together < 8 and (kernel == "key_gradients" or dim > 64))
    large, most = together * dim > 1024, 32 if small else 64
    block = min(most, max(16, min(32768 // (together * dim), 512 // together)))
    if few or (positionwise and by_query):  # matrices of queries and their gradient take registers too
        block = 16
    moving = 16 if positionwise else max(16, min(most, 8192 // (together * block), 16384 // (together * dim)))
    if kernel == "key_gradients":
        return Tile(moving, block, 8, 1 if large else 2)
    if kernel == "value_gradients":
        return Tile(moving, block, 8, 2 if large or positionwise else 3)
    # Where q and do are loaded in parts, a second tile in flight would not fit.
    return Tile(block, moving, 8, 1 if large and by_query else 2 if large or by_query else 3)


class TiledLaunch(Launch):
    """A call as what the kernels are given.

    Args:
        call: one that the tiled backend can compute.
        seed: of dropout, below 2**62.
        run: launches a kernel.
        few: whether large tiles would leave multiprocessors idle; if ``None``, by the numbers of queries and heads.
    """

    def __init__(
        self,
        call: AttentionCall,
        seed: int,
        run: Callable[[Kernel], object] = Kernel.run,
        few: bool | None = None,
    ) -> None:
        super().__init__(call, seed, run)
        self.mask = _mask(call.mask, call.scores.shape, self.mask)
        self.factor = self.scale * LOG2_E
        threshold = round(65536 * call.dropout_p)
        self.dropout = tiled_kernels.Dropout(self.seed, threshold, 65536 / (65536 - threshold)) if threshold else None
        self.few = has_few_programs(call) if few is None else few

    def forward(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the heads, and return them with what the backward pass reads.

        It reads the log-sum-exp of each row, and what pass 1 averaged: the keys where that saves a pass, or the values.
        """
        output, lse = empty_heads(self.v, self.queries, self.heads, self.v.size(3)), self._row_numbers()
        if self.empty:
            return output.zero_(), (lse,)
        q, k, v = map(_view, (self.q, self.k, self.v))
        scores = (q, k, v, self.factor, self.score_mixing, self.mask)
        if not self._meets:
            self._launch("averages", (*scores, self.dropout, lse, _view(output)), tiled_kernels.OF_VALUES)
            return output, (lse, output)
        kept: tuple[Tensor, ...] = (lse,)
        if self._averages_keys:
            average = empty_heads(self.q, self.queries, self.heads, self.q.size(3))
            self._launch("averages", (*scores, None, lse, _view(average)), tiled_kernels.OF_KEYS)
            kept = (lse, average)
        else:
            self._launch("statistics", (*scores, None, lse, None), tiled_kernels.NOTHING)
        arguments = (q, k, v, self.factor, self.score_mixing, self.prob_mixing, self.mask, self.dropout, lse)
        self._launch("attend", (*arguments, _view(output)))
        return output, kept if self.call.mixes_weights else (lse, output)

    def _readable(self, tensor: Tensor) -> Tensor:
        """Return a tensor that the kernels read. Unmixed heads are loaded 16 bytes at a time."""
        tensor = super()._readable(tensor)
        return tensor if self._meets or _is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)

    @property
    def _meets(self) -> bool:
        """Return True if heads are mixed."""
        return self.call.score_mixing is not None or self.call.mixes_weights

    @property
    def _averages_keys(self) -> bool:
        """Return True if averages of keys save the backward pass a separate pass for Σ_s P ∘ dP."""
        return self.call.score_mixing is None and self.call.mixes_weights and self.call.dot_product.q.requires_grad

    def _gradients(self, grad_output: Tensor, *kept: Tensor) -> list[Tensor | None]:
        call, (lse, *averaged) = self.call, kept
        q, k, v, grad = map(_view, (self.q, self.k, self.v, grad_output))
        rules = self.score_mixing, self.prob_mixing, self.mask, self.dropout
        arguments = (q, k, v, self.factor, self.scale, *rules, lse, grad)
        grad_q = of_mixing = of_scores = None
        no_matrix = _matrix(None)
        if call.dot_product.q.requires_grad or call.score_mixing is not None:
            grad_q = empty_heads(self.q, self.queries, self.heads, self.q.size(3))
        if call.mixes_weights:
            sums = self._row_numbers()
            of_mixing, view = self._matrix_gradient("row_sums", call.prob_mixing)
            merged = grad_q is not None and call.score_mixing is None
            results = (_view(averaged[0]), sums, _view(grad_q)) if merged else (None, sums, None)  # type: ignore[arg-type]
            name = "query_gradients" if merged else "row_sums"
            self._launch(name, (*arguments, *results, view, no_matrix), constexpr(False))
        else:
            # Σ_s P_s dP_s = Σ_s P_s do·v_s, with dropout too
            sums = torch.linalg.vecdot(grad_output.float(), averaged[0].float()).contiguous()
        if grad_q is not None and not (call.mixes_weights and call.score_mixing is None):
            of_scores, view = self._matrix_gradient("query_gradients", call.score_mixing)
            self._launch("query_gradients", (*arguments, None, sums, _view(grad_q), no_matrix, view), constexpr(True))
        grad_k, grad_v = self._key_gradients((*arguments, sums))
        of_mixing = of_mixing if of_mixing is None or of_mixing.dim() == 4 else of_mixing.sum(dim=0)
        of_scores = None if of_scores is None else of_scores.sum(dim=0)
        mixings = ((call.score_mixing, of_scores), (call.prob_mixing, of_mixing))
        return [grad_q, grad_k, grad_v, *(gradient for mixing, gradient in mixings if mixing is not None)]

    def _key_gradients(self, arguments: tuple) -> list[Tensor | None]:
        """Compute dk and dv, in one pass where heads are not mixed."""
        wanted = self.call.dot_product.k.requires_grad, self.call.v.requires_grad
        results = [self._shared(of) if want else None for of, want in zip((self.k, self.v), wanted, strict=True)]
        views = [None if result is None else _view(result) for result in results]
        if all(wanted) and not self._meets:
            self._launch("key_gradients", (*arguments, *views), tiled_kernels.NOTHING)
        else:
            parts = ("key_gradients", tiled_kernels.OF_KEYS), ("value_gradients", tiled_kernels.OF_VALUES)
            for (name, part), view in zip(parts, views, strict=True):
                if view is not None:
                    self._launch(name, (*arguments, *views), part)
        return [
            result if result is None or of.size(1) == self.heads else result.unflatten(1, (of.size(1), -1)).sum(dim=2)
            for of, result in zip((self.k, self.v), results, strict=True)
        ]

    def _shared(self, of: Tensor) -> Tensor:
        """Return memory for the gradient of keys or values, in float32 where heads share them."""
        like = of if of.size(1) == self.heads else of.new_empty(0, dtype=torch.float32).expand(self.batch, -1)
        return empty_heads(like, self.keys, self.heads, of.size(3))

    def _launch(self, name: str, arguments: tuple, *further: Any) -> None:
        functions = {"averages": "statistics", "row_sums": "query_pass", "query_gradients": "query_pass"}
        functions |= {"key_gradients": "key_pass", "value_gradients": "key_pass"}
        shape, tile = self._shape(name)
        by_keys = name in ("key_gradients", "value_gradients")
        blocks = cdiv(self.keys, tile.keys) if by_keys else cdiv(self.queries, tile.rows)
        programs = blocks * self.batch * (self.heads if shape.BLOCK_H.value == 1 else 1)
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
        if shape.BLOCK_H.value > 1:
            # Unasked, ptxas spills those beyond half of all registers, for which an SM could hold another program.
            options["maxnreg"] = min(255, 65536 // (32 * tile.warps))
        function = getattr(tiled_kernels, functions.get(name, name))
        self.run(Kernel(name, function, (programs, 1), (*arguments, shape, *further), options))

    def _shape(self, name: str) -> tuple[Any, Any]:
        meets = self.call.score_mixing is not None or (
            self.call.mixes_weights and name not in ("statistics", "averages")
        )
        positionwise = meets and isinstance(self.call.prob_mixing, PositionwiseMixing)
        together = next_power_of_2(self.heads) if meets else 1
        together = max(16, together) if positionwise else together
        dims = self.q.size(3), self.v.size(3)
        padded = [max(16, next_power_of_2(dim)) for dim in dims]
        tile = tile_of(name, together, max(padded), self.few, positionwise)
        copies = max(1, 16 // together) if meets else 1
        numbers = (self.heads, together, copies, tile.rows, tile.keys, dims[0], padded[0], dims[1], padded[1])
        groups = self.k.size(1), self.v.size(1)
        # q and do of a block of queries, which no loop loads again, leave no room for keys and values.
        large = meets and name in ("row_sums", "query_gradients") and together * max(padded) > 1024
        chunk = min(*padded, 1024 // together) if large else 0
        further = (
            self.call.activation == "sigsoftmax",
            _DTYPES[self.dtype],
            tile.stages,
            chunk,
            tile.warps,
        )
        wide = any(map(_is_wide, (self.q, self.k, self.v)))
        return tiled_kernels.Shape(*map(constexpr, (*numbers, *groups, *further, wide))), tile


def has_few_programs(call: AttentionCall) -> bool:
    """Return True if tiles of the largest size would leave multiprocessors idle."""
    batch, heads, queries, _ = call.scores.shape
    if call.score_mixing is None and not call.mixes_weights:
        return cdiv(queries, 128) * batch * heads < PROGRAMS
    dim = max(16, next_power_of_2(max(call.v.size(3), call.dot_product.q.size(3))))
    return cdiv(queries, tile_of("attend", next_power_of_2(heads), dim, False).rows) * batch < PROGRAMS


def _is_aligned(tensor: Tensor) -> bool:
    """Return True if Triton is told that ``[B, H, N, D]`` is aligned: its address and its strides are multiples of 16."""
    return all(number % 16 == 0 for number in (tensor.data_ptr(), *tensor.stride()[:3]))


def _mask(mask: AttentionMask, scores: tuple[int, int, int, int], plain: kernels.Mask) -> tiled_kernels.Mask:
    """Return ``mask`` as these kernels read it; its additive part is that of ``plain``."""
    _, _, queries, keys = scores
    positions, offset = mask.visible_prefix(queries, keys)
    counted = mask.causal and (mask.num_appended_keys > 0 or mask.query_repeats > 1)
    lengths = padding = None
    if mask.key_padding is not None:
        counts = torch.arange(1, keys + 1, dtype=torch.int32, device=mask.key_padding.device)
        lengths = (counts * ~mask.key_padding).amax(dim=1) if keys else None
        if not is_right_padding(mask.key_padding):
            padding = mask.key_padding.contiguous().view(torch.uint8)
    return tiled_kernels.Mask(
        queries,
        keys,
        offset,
        mask.window,
        constexpr(mask.causal),
        constexpr(counted),
        positions,
        mask.num_appended_keys,
        lengths,
        padding,
        *(plain.additive, plain.batch, plain.head, plain.query, plain.key, plain.hides_from),
        constexpr(mask.differs_by_head),
    )
