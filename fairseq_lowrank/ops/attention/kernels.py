"""The kernels of the triton backend: what a program computes on a tile of queries and keys. See :mod:`.triton`.

Importing this module imports triton. A tile is ``[heads, rows, keys]``, in the kernel of keys ``[heads, keys, rows]``. If heads
are mixed, all of them are in one tile; otherwise a program has one head. As in other attention kernels, ``BLOCK_M`` counts
queries, ``BLOCK_N`` keys and ``BLOCK_D`` features, ``m_i`` and ``l_i`` are running maxima and sums, and ``lse`` is the
log-sum-exp of a row. Addresses are 64-bit; offsets within a batch entry are 32-bit where that is enough, which saves registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

NONE, STATIC, POSITIONWISE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Kinds of mixing."""
NOT_CAUSAL, CAUSAL, CAUSAL_REPEATED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Causality: hides nothing; hides s > t + offset; counts queries again from 0 after each repeat, or shows appended keys."""


class View(NamedTuple):
    """A tensor ``[B, heads, N, D]`` whose last dimension is contiguous: itself and its strides."""

    data: Any
    batch: Any
    head: Any
    position: Any


class Matrix(NamedTuple):
    """M of mixing, indices (b, t, j, i): the tensor, its strides, and its kind."""

    data: Any
    batch: Any
    position: Any
    row: Any
    column: Any
    KIND: Any


class Mask(NamedTuple):
    """Which keys each query sees, as :class:`~fairseq_lowrank.ops.attention.AttentionMask` has it."""

    queries: Any
    keys: Any
    positions: Any
    offset: Any
    num_appended_keys: Any
    CAUSALITY: Any
    padding: Any
    """``[B, S]`` bytes or None."""
    additive: Any
    """``[B, H, T, S]`` by its strides: bytes, floats or None."""
    batch: Any
    head: Any
    query: Any
    key: Any
    hides_from: Any
    """A float mask hides where it is this or less; None where it is one of bytes."""


class Dropout(NamedTuple):
    seed: Any
    rate: Any
    scale: Any


class Shape(NamedTuple):
    """What is known when a kernel is compiled."""

    HEADS: Any
    BLOCK_H: Any
    """Heads of a program, padded to a power of two; 1 if heads are not mixed."""
    BLOCK_M: Any
    BLOCK_N: Any
    DIM: Any
    BLOCK_D: Any
    VALUE_DIM: Any
    BLOCK_DV: Any
    BLOCK_OUT: Any
    """Columns of the output that a program computes."""
    KEY_GROUPS: Any
    VALUE_GROUPS: Any
    SIGSOFTMAX: Any
    DTYPE: Any
    PRECISION: Any
    """Of products of float32."""
    INTERPRETED: Any
    WIDE: Any
    """Whether a batch entry spans more than 32-bit offsets reach."""


@triton.jit
def _program_offsets(count, shape, BLOCK_M: tl.constexpr):
    """Return the first row of a program, its batch entry and its heads. The last rows, which see the most keys, come first."""
    blocks = tl.cdiv(count, BLOCK_M)
    program = tl.program_id(0)
    start = (blocks - 1 - program % blocks) * BLOCK_M
    entry = program // blocks
    if shape.BLOCK_H == 1:
        heads = entry % shape.HEADS + tl.arange(0, 1)
        entry = entry // shape.HEADS
    else:
        heads = tl.arange(0, shape.BLOCK_H)
    return start, entry, heads


@triton.jit
def _load(view, batch, heads, start, length, first, shape, GROUPS: tl.constexpr, DIM: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Load ``[heads, COUNT, WIDTH]`` from row ``start`` and column ``first`` on; 0 outside."""
    groups = heads
    if GROUPS != shape.HEADS:
        groups = heads * GROUPS // shape.HEADS
    rows, columns = tl.arange(0, COUNT), first + tl.arange(0, WIDTH)
    begin = tl.cast(start, tl.int64)
    origin = view.data + tl.cast(batch, tl.int64) * view.batch + begin * view.position
    if shape.WIDE:
        groups = tl.cast(groups, tl.int64)
    offsets = groups[:, None, None] * view.head + rows[None, :, None] * view.position + columns[None, None, :]
    inside = (heads < shape.HEADS)[:, None, None] & (start + rows < length)[None, :, None]
    inside = inside & (columns < DIM)[None, None, :]
    return tl.load(origin + offsets, mask=inside, other=0.0).to(shape.DTYPE)


@triton.jit
def _store(view, values, batch, heads, start, length, first, shape, DIM: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    rows, columns = tl.arange(0, COUNT), first + tl.arange(0, WIDTH)
    begin = tl.cast(start, tl.int64)
    origin = view.data + tl.cast(batch, tl.int64) * view.batch + begin * view.position
    places = heads
    if shape.WIDE:
        places = tl.cast(heads, tl.int64)
    offsets = places[:, None, None] * view.head + rows[None, :, None] * view.position + columns[None, None, :]
    inside = (heads < shape.HEADS)[:, None, None] & (start + rows < length)[None, :, None]
    inside = inside & (columns < DIM)[None, None, :]
    tl.store(origin + offsets, values.to(view.data.dtype.element_ty), mask=inside)


@triton.jit
def _row_pointers(data, batch, heads, start, length, shape):
    """Return pointers to a number for each row ``[B, H, T]``, and which are inside."""
    rows = start + tl.arange(0, shape.BLOCK_M)
    lines = tl.cast(batch, tl.int64) * shape.HEADS + heads
    return data + lines[:, None] * length + rows[None, :], (heads < shape.HEADS)[:, None] & (rows < length)[None, :]


@triton.jit
def _load_rows(data, batch, heads, start, length, shape):
    pointers, inside = _row_pointers(data, batch, heads, start, length, shape)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _dot(left, right, shape):
    """Return left @ right in float32."""
    if shape.INTERPRETED:  # the interpreter would multiply the bits of bfloat16 as integers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision=shape.PRECISION)


@triton.jit
def _head_product(left, right, shape):
    """Return left @ right, head by head."""
    if shape.BLOCK_H == 1:
        left = tl.reshape(left, (left.shape[1], left.shape[2]))
        right = tl.reshape(right, (right.shape[1], right.shape[2]))
        result = _dot(left, right, shape)[None, :, :]
    else:
        result = _dot(left, right, shape)
    return result


@triton.jit
def _transpose_tile(tile):
    return tl.permute(tile, (0, 2, 1))


@triton.jit
def _matrix(matrix, batch, start, length, shape, OUTPUT_FIRST: tl.constexpr):
    """Load M as ``[H, H]``, or ``[rows, H, H]`` where it is position-wise; [i, j] if ``OUTPUT_FIRST``, else [j, i]."""
    one, other = tl.arange(0, shape.BLOCK_H)[:, None], tl.arange(0, shape.BLOCK_H)[None, :]
    inside = (one < shape.HEADS) & (other < shape.HEADS)
    offsets = one * matrix.row + other * matrix.column
    if OUTPUT_FIRST:
        offsets = other * matrix.row + one * matrix.column
    if matrix.KIND == NONE:
        loaded = 0
    elif matrix.KIND == STATIC:
        loaded = tl.load(matrix.data + offsets, mask=inside, other=0.0).to(tl.float32)
    else:
        rows = tl.arange(0, shape.BLOCK_M)
        begin = tl.cast(start, tl.int64)
        origin = matrix.data + tl.cast(batch, tl.int64) * matrix.batch + begin * matrix.position
        pointers = origin + rows[:, None, None] * matrix.position + offsets[None, :, :]
        existing = (start + rows < length)[:, None, None] & inside[None, :, :]
        loaded = tl.load(pointers, mask=existing, other=0.0).to(tl.float32)
    return loaded


@triton.jit
def _mixed(matrix, tile, shape, KIND: tl.constexpr, KEYS_FIRST: tl.constexpr, EXACT: tl.constexpr):
    """Return Σ_j matrix[i, j] tile_j of float32 ``tile [H, rows, keys]``, or ``[H, keys, rows]``.

    In the dtype of the operation, or if ``EXACT`` to float32: each factor in two parts of 8 bits, without the product of
    the small ones.
    """
    if KIND == STATIC:
        flat = tl.reshape(tile, (tile.shape[0], tile.shape[1] * tile.shape[2]))
        tile = tl.reshape(_mixing_product(matrix, flat, shape, EXACT), tile.shape)
    elif KIND == POSITIONWISE and KEYS_FIRST:
        tile = tl.permute(_mixing_product(matrix, tl.permute(tile, (2, 0, 1)), shape, EXACT), (1, 2, 0))
    elif KIND == POSITIONWISE:
        tile = tl.permute(_mixing_product(matrix, tl.permute(tile, (1, 0, 2)), shape, EXACT), (1, 0, 2))
    return tile


@triton.jit
def _mixing_product(left, right, shape, EXACT: tl.constexpr):
    if tl.float32 == shape.DTYPE:
        result = _dot(left, right, shape)
    elif EXACT:
        large_left, large_right = left.to(tl.bfloat16), right.to(tl.bfloat16)
        small_left = (left - large_left.to(tl.float32)).to(tl.bfloat16)
        small_right = (right - large_right.to(tl.float32)).to(tl.bfloat16)
        result = _dot(small_left, large_right, shape) + _dot(large_left, small_right, shape)
        result += _dot(large_left, large_right, shape)
    else:
        result = _dot(left.to(shape.DTYPE), right.to(shape.DTYPE), shape)
    return result


@triton.jit
def _matrix_gradient(heads, grad, shape):
    """Return Σ heads_j grad_i over rows and keys, ``[H, H]``."""
    size: tl.constexpr = heads.shape[1] * heads.shape[2]
    left = tl.reshape(heads.to(shape.DTYPE), (shape.BLOCK_H, size))
    right = tl.reshape(grad.to(shape.DTYPE), (shape.BLOCK_H, size))
    return _dot(left, tl.trans(right), shape)


@triton.jit
def _apply_mask(scores, mask, batch, heads, t, s, shape):
    """Return scores with the additive mask, and which of them are visible. ``heads``, ``t``, ``s`` broadcast to the tile."""
    visible = (t < mask.queries) & (s < mask.keys)
    if mask.CAUSALITY == CAUSAL:
        visible = visible & (s <= t + mask.offset)
    if mask.CAUSALITY == CAUSAL_REPEATED:
        visible = visible & ((s <= t % mask.positions + mask.offset) | (s >= mask.keys - mask.num_appended_keys))
    if mask.padding is not None:
        padding = tl.load(mask.padding + tl.cast(batch, tl.int64) * mask.keys + s, mask=s < mask.keys, other=1)
        visible = visible & (padding == 0)
    if mask.additive is not None:
        origin = mask.additive + tl.cast(batch, tl.int64) * mask.batch
        pointers = origin + heads * tl.cast(mask.head, tl.int64) + t * tl.cast(mask.query, tl.int64)
        pointers = pointers + s * tl.cast(mask.key, tl.int64)
        within = (t < mask.queries) & (s < mask.keys) & (heads < shape.HEADS)
        if mask.hides_from is None:
            visible = visible & (tl.load(pointers, mask=within, other=1) == 0)
        else:
            bias = tl.load(pointers, mask=within, other=0.0).to(tl.float32)
            visible = visible & (bias > mask.hides_from)
            scores = scores + tl.where(visible, bias, 0.0)
    return scores, visible


@triton.jit
def _logits(scores, visible, shape):
    """Return the logits of the softmax, −inf where hidden."""
    if shape.SIGSOFTMAX:
        scores = tl.minimum(scores, 0.0) + scores - tl.log(1.0 + tl.exp(-tl.abs(scores)))
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _dropped(tile, dropout, batch, heads, t, s, shape):
    """Return dropped and scaled weights. The mask depends only on the position of a weight, so all kernels draw the same."""
    if dropout is not None:
        here = tl.zeros(tile.shape, tl.int32)
        drawn, _, _, _ = tl.philox(dropout.seed, s + here, t + here, batch * shape.HEADS + heads + here, here)
        tile = tl.where(tl.uint_to_uniform_float(drawn) >= dropout.rate, tile * dropout.scale, 0.0)
    return tile


@triton.jit
def _last_key(start, mask, shape):
    """Return the end of the keys that some query of a block sees."""
    end = mask.keys
    if mask.CAUSALITY == CAUSAL:
        end = tl.minimum(end, start + shape.BLOCK_M + mask.offset)
    return end


@triton.jit
def _compute_logits(
    left, right, scale, matrix, mask, batch, heads, t, s, shape, KIND: tl.constexpr, KEYS_FIRST: tl.constexpr
):
    """Return scale · left rightᵀ of each head of a tile, the mixed scores with the additive mask, and the logits."""
    unmixed = _head_product(left, _transpose_tile(right), shape) * scale
    scores = _mixed(matrix, unmixed, shape, KIND, KEYS_FIRST, True)
    scores, visible = _apply_mask(scores, mask, batch, heads[:, None, None], t, s, shape)
    return unmixed, scores, _logits(scores, visible, shape)


@triton.jit
def row_statistics(q, k, scale, score_mixing, mask, lse, shape):
    """Compute pass 1: the log-sum-exp of each row of logits, 0 where no key is seen."""
    start, batch, heads = _program_offsets(mask.queries, shape, shape.BLOCK_M)
    queries = _load(q, batch, heads, start, mask.queries, 0, shape, shape.HEADS, shape.DIM, shape.BLOCK_M, shape.BLOCK_D)  # fmt: skip
    matrix = _matrix(score_mixing, batch, start, mask.queries, shape, True)
    t = (start + tl.arange(0, shape.BLOCK_M))[None, :, None]
    m_i = tl.full((shape.BLOCK_H, shape.BLOCK_M), float("-inf"), tl.float32)
    l_i = tl.zeros((shape.BLOCK_H, shape.BLOCK_M), tl.float32)
    for first in range(0, _last_key(start, mask, shape), shape.BLOCK_N):
        keys = _load(k, batch, heads, first, mask.keys, 0, shape, shape.KEY_GROUPS, shape.DIM, shape.BLOCK_N, shape.BLOCK_D)  # fmt: skip
        s = (first + tl.arange(0, shape.BLOCK_N))[None, None, :]
        _, _, logits = _compute_logits(
            queries, keys, scale, matrix, mask, batch, heads, t, s, shape, score_mixing.KIND, False
        )
        new = tl.maximum(m_i, tl.max(logits, 2))
        finite = tl.where(new == float("-inf"), 0.0, new)
        l_i = l_i * tl.exp(m_i - finite) + tl.sum(tl.exp(logits - finite[:, :, None]), 2)
        m_i = new
    pointers, inside = _row_pointers(lse, batch, heads, start, mask.queries, shape)
    tl.store(pointers, tl.where(l_i > 0, m_i + tl.log(tl.where(l_i > 0, l_i, 1.0)), 0.0), mask=inside)


@triton.jit
def attend(q, k, v, scale, score_mixing, prob_mixing, mask, dropout, lse, output, shape):
    """Compute pass 2: P̄ V of a block of queries."""
    start, batch, heads = _program_offsets(mask.queries, shape, shape.BLOCK_M)
    column = tl.program_id(1) * shape.BLOCK_OUT
    queries = _load(q, batch, heads, start, mask.queries, 0, shape, shape.HEADS, shape.DIM, shape.BLOCK_M, shape.BLOCK_D)  # fmt: skip
    score_matrix = _matrix(score_mixing, batch, start, mask.queries, shape, True)
    matrix = _matrix(prob_mixing, batch, start, mask.queries, shape, True)
    lse_i = _load_rows(lse, batch, heads, start, mask.queries, shape)[:, :, None]
    t = (start + tl.arange(0, shape.BLOCK_M))[None, :, None]
    acc = tl.zeros((shape.BLOCK_H, shape.BLOCK_M, shape.BLOCK_OUT), tl.float32)
    for first in range(0, _last_key(start, mask, shape), shape.BLOCK_N):
        keys = _load(k, batch, heads, first, mask.keys, 0, shape, shape.KEY_GROUPS, shape.DIM, shape.BLOCK_N, shape.BLOCK_D)  # fmt: skip
        s = (first + tl.arange(0, shape.BLOCK_N))[None, None, :]
        _, _, logits = _compute_logits(
            queries, keys, scale, score_matrix, mask, batch, heads, t, s, shape, score_mixing.KIND, False
        )
        weights = tl.exp(logits - lse_i)
        weights = _mixed(matrix, weights, shape, prob_mixing.KIND, False, False)
        weights = _dropped(weights, dropout, batch, heads[:, None, None], t, s, shape)
        values = _load(v, batch, heads, first, mask.keys, column, shape, shape.VALUE_GROUPS, shape.VALUE_DIM, shape.BLOCK_N, shape.BLOCK_OUT)  # fmt: skip
        acc += _head_product(weights.to(shape.DTYPE), values, shape)
    _store(
        output, acc, batch, heads, start, mask.queries, column, shape, shape.VALUE_DIM, shape.BLOCK_M, shape.BLOCK_OUT
    )


@triton.jit
def row_sums(q, k, v, scale, score_mixing, prob_mixing, mask, dropout, lse, grad, sums, prob_mixing_grad, shape):
    """Compute backward pass 1: Σ_s P ∘ dP of each row, and the gradient of M: of each query, or a block's part of it."""
    start, batch, heads = _program_offsets(mask.queries, shape, shape.BLOCK_M)
    queries = _load(q, batch, heads, start, mask.queries, 0, shape, shape.HEADS, shape.DIM, shape.BLOCK_M, shape.BLOCK_D)  # fmt: skip
    grads = _load(grad, batch, heads, start, mask.queries, 0, shape, shape.HEADS, shape.VALUE_DIM, shape.BLOCK_M, shape.BLOCK_DV)  # fmt: skip
    score_matrix = _matrix(score_mixing, batch, start, mask.queries, shape, True)
    matrix = _matrix(prob_mixing, batch, start, mask.queries, shape, False)
    lse_i = _load_rows(lse, batch, heads, start, mask.queries, shape)[:, :, None]
    t = (start + tl.arange(0, shape.BLOCK_M))[None, :, None]
    acc = tl.zeros((shape.BLOCK_H, shape.BLOCK_M), tl.float32)
    if prob_mixing.KIND == STATIC:
        gradient = tl.zeros((shape.BLOCK_H, shape.BLOCK_H), tl.float32)
    else:
        gradient = tl.zeros((shape.BLOCK_M, shape.BLOCK_H, shape.BLOCK_H), tl.float32)
    for first in range(0, _last_key(start, mask, shape), shape.BLOCK_N):
        keys = _load(k, batch, heads, first, mask.keys, 0, shape, shape.KEY_GROUPS, shape.DIM, shape.BLOCK_N, shape.BLOCK_D)  # fmt: skip
        s = (first + tl.arange(0, shape.BLOCK_N))[None, None, :]
        _, _, logits = _compute_logits(
            queries, keys, scale, score_matrix, mask, batch, heads, t, s, shape, score_mixing.KIND, False
        )
        weights = tl.exp(logits - lse_i)
        values = _load(v, batch, heads, first, mask.keys, 0, shape, shape.VALUE_GROUPS, shape.VALUE_DIM, shape.BLOCK_N, shape.BLOCK_DV)  # fmt: skip
        grad_mixed = _head_product(grads, _transpose_tile(values), shape)
        grad_mixed = _dropped(grad_mixed, dropout, batch, heads[:, None, None], t, s, shape)
        if prob_mixing.KIND == STATIC:
            gradient += _matrix_gradient(weights, grad_mixed, shape)
            acc += tl.sum(weights * _mixed(matrix, grad_mixed, shape, STATIC, False, False), 2)
        else:
            by_row = tl.permute(weights, (1, 0, 2)).to(shape.DTYPE)
            grad_by_row = tl.permute(grad_mixed, (1, 2, 0)).to(shape.DTYPE)
            gradient += _dot(by_row, grad_by_row, shape)
    pointers, inside = _row_pointers(sums, batch, heads, start, mask.queries, shape)
    one, other = tl.arange(0, shape.BLOCK_H)[:, None], tl.arange(0, shape.BLOCK_H)[None, :]
    within = (one < shape.HEADS) & (other < shape.HEADS)
    if prob_mixing.KIND == STATIC:
        tl.store(pointers, acc, mask=inside)
        part = prob_mixing_grad.data + tl.cast(tl.program_id(0), tl.int64) * prob_mixing_grad.position
        tl.store(part + one * prob_mixing_grad.row + other, gradient, mask=within)
    else:
        # Σ_s P_j dP_j = Σ_i M[j, i] dM[j, i]
        tl.store(pointers, tl.trans(tl.sum(matrix * gradient, 2)), mask=inside)
        rows = tl.arange(0, shape.BLOCK_M)
        origin = prob_mixing_grad.data + tl.cast(batch, tl.int64) * prob_mixing_grad.batch
        origin += tl.cast(start, tl.int64) * prob_mixing_grad.position
        places = rows[:, None, None] * prob_mixing_grad.position + (one * prob_mixing_grad.row + other)[None, :, :]
        existing = (start + rows < mask.queries)[:, None, None] & within[None, :, :]
        tl.store(origin + places, gradient.to(prob_mixing_grad.data.dtype.element_ty), mask=existing)


@triton.jit
def _score_gradient(weights, scores, grad_mixed, matrix, sums, shape, KIND: tl.constexpr, KEYS_FIRST: tl.constexpr):  # fmt: skip
    """Return dS' = P ∘ (dP − Σ_s P ∘ dP), times ds/dz of z = s + log σ(s) where sigsoftmax is."""
    grad = weights * (_mixed(matrix, grad_mixed, shape, KIND, KEYS_FIRST, False) - sums)
    if shape.SIGSOFTMAX:
        grad = grad * (2.0 - 1.0 / (1.0 + tl.exp(-scores)))
    return grad


@triton.jit
def query_gradients(
    q, k, v, scale, score_mixing, prob_mixing, mask, dropout, lse, grad, sums, grad_q, score_mixing_grad, shape
):
    """Compute backward pass 2: dq of a block of queries, and its part of the gradient of the matrix that mixes scores."""
    start, batch, heads = _program_offsets(mask.queries, shape, shape.BLOCK_M)
    column = tl.program_id(1) * shape.BLOCK_OUT
    queries = _load(q, batch, heads, start, mask.queries, 0, shape, shape.HEADS, shape.DIM, shape.BLOCK_M, shape.BLOCK_D)  # fmt: skip
    grads = _load(grad, batch, heads, start, mask.queries, 0, shape, shape.HEADS, shape.VALUE_DIM, shape.BLOCK_M, shape.BLOCK_DV)  # fmt: skip
    score_matrix = _matrix(score_mixing, batch, start, mask.queries, shape, True)
    backward_matrix = _matrix(score_mixing, batch, start, mask.queries, shape, False)
    matrix = _matrix(prob_mixing, batch, start, mask.queries, shape, False)
    lse_i = _load_rows(lse, batch, heads, start, mask.queries, shape)[:, :, None]
    row_sums = _load_rows(sums, batch, heads, start, mask.queries, shape)[:, :, None]
    t = (start + tl.arange(0, shape.BLOCK_M))[None, :, None]
    acc = tl.zeros((shape.BLOCK_H, shape.BLOCK_M, shape.BLOCK_OUT), tl.float32)
    gradient = tl.zeros((shape.BLOCK_H, shape.BLOCK_H), tl.float32)
    for first in range(0, _last_key(start, mask, shape), shape.BLOCK_N):
        keys = _load(k, batch, heads, first, mask.keys, 0, shape, shape.KEY_GROUPS, shape.DIM, shape.BLOCK_N, shape.BLOCK_D)  # fmt: skip
        values = _load(v, batch, heads, first, mask.keys, 0, shape, shape.VALUE_GROUPS, shape.VALUE_DIM, shape.BLOCK_N, shape.BLOCK_DV)  # fmt: skip
        s = (first + tl.arange(0, shape.BLOCK_N))[None, None, :]
        unmixed, scores, logits = _compute_logits(
            queries, keys, scale, score_matrix, mask, batch, heads, t, s, shape, score_mixing.KIND, False
        )
        weights = tl.exp(logits - lse_i)
        grad_mixed = _head_product(grads, _transpose_tile(values), shape)
        grad_mixed = _dropped(grad_mixed, dropout, batch, heads[:, None, None], t, s, shape)
        grad_scores = _score_gradient(weights, scores, grad_mixed, matrix, row_sums, shape, prob_mixing.KIND, False)
        if score_mixing.KIND != NONE:
            gradient += _matrix_gradient(unmixed, grad_scores, shape)
            grad_scores = _mixed(backward_matrix, grad_scores, shape, score_mixing.KIND, False, False)
        if shape.BLOCK_OUT != shape.BLOCK_D:
            keys = _load(k, batch, heads, first, mask.keys, column, shape, shape.KEY_GROUPS, shape.DIM, shape.BLOCK_N, shape.BLOCK_OUT)  # fmt: skip
        acc += _head_product(grad_scores.to(shape.DTYPE), keys, shape)
    _store(
        grad_q, acc * scale, batch, heads, start, mask.queries, column, shape, shape.DIM, shape.BLOCK_M, shape.BLOCK_OUT
    )
    if score_mixing.KIND != NONE and tl.program_id(1) == 0:
        one, other = tl.arange(0, shape.BLOCK_H)[:, None], tl.arange(0, shape.BLOCK_H)[None, :]
        within = (one < shape.HEADS) & (other < shape.HEADS)
        part = score_mixing_grad.data + tl.cast(tl.program_id(0), tl.int64) * score_mixing_grad.position
        tl.store(part + one * score_mixing_grad.row + other, gradient, mask=within)


@triton.jit
def key_gradients(
    q, k, v, scale, score_mixing, prob_mixing, mask, dropout, lse, grad, sums, result, shape, OF_KEYS: tl.constexpr
):
    """Compute backward pass 3: dk, or dv, of a block of keys, a head each where heads share them. Tiles are ``[H, keys, rows]``."""
    start, batch, heads = _program_offsets(mask.keys, shape, shape.BLOCK_N)
    column = tl.program_id(1) * shape.BLOCK_OUT
    keys = _load(k, batch, heads, start, mask.keys, 0, shape, shape.KEY_GROUPS, shape.DIM, shape.BLOCK_N, shape.BLOCK_D)  # fmt: skip
    if OF_KEYS:
        values = _load(v, batch, heads, start, mask.keys, 0, shape, shape.VALUE_GROUPS, shape.VALUE_DIM, shape.BLOCK_N, shape.BLOCK_DV)  # fmt: skip
    score_matrix = _matrix(score_mixing, batch, 0, mask.queries, shape, True)
    backward_matrix = _matrix(score_mixing, batch, 0, mask.queries, shape, False)
    matrix = _matrix(prob_mixing, batch, 0, mask.queries, shape, not OF_KEYS)
    s = (start + tl.arange(0, shape.BLOCK_N))[None, :, None]
    acc = tl.zeros((shape.BLOCK_H, shape.BLOCK_N, shape.BLOCK_OUT), tl.float32)
    begin = 0
    if mask.CAUSALITY == CAUSAL:
        begin = tl.maximum(start - mask.offset, 0) // shape.BLOCK_M * shape.BLOCK_M
    for first in range(begin, mask.queries, shape.BLOCK_M):
        t = (first + tl.arange(0, shape.BLOCK_M))[None, None, :]
        queries = _load(q, batch, heads, first, mask.queries, 0, shape, shape.HEADS, shape.DIM, shape.BLOCK_M, shape.BLOCK_D)  # fmt: skip
        if prob_mixing.KIND == POSITIONWISE:
            matrix = _matrix(prob_mixing, batch, first, mask.queries, shape, not OF_KEYS)
        lse_i = _load_rows(lse, batch, heads, first, mask.queries, shape)[:, None, :]
        _, scores, logits = _compute_logits(
            keys, queries, scale, score_matrix, mask, batch, heads, t, s, shape, score_mixing.KIND, True
        )
        weights = tl.exp(logits - lse_i)
        if OF_KEYS:
            grads = _load(grad, batch, heads, first, mask.queries, 0, shape, shape.HEADS, shape.VALUE_DIM, shape.BLOCK_M, shape.BLOCK_DV)  # fmt: skip
            grad_mixed = _head_product(values, _transpose_tile(grads), shape)
            grad_mixed = _dropped(grad_mixed, dropout, batch, heads[:, None, None], t, s, shape)
            row_sums = _load_rows(sums, batch, heads, first, mask.queries, shape)[:, None, :]
            grad_scores = _score_gradient(weights, scores, grad_mixed, matrix, row_sums, shape, prob_mixing.KIND, True)
            if score_mixing.KIND != NONE:
                grad_scores = _mixed(backward_matrix, grad_scores, shape, score_mixing.KIND, True, False)
            if shape.BLOCK_OUT != shape.BLOCK_D:
                queries = _load(q, batch, heads, first, mask.queries, column, shape, shape.HEADS, shape.DIM, shape.BLOCK_M, shape.BLOCK_OUT)  # fmt: skip
            acc += _head_product(grad_scores.to(shape.DTYPE), queries, shape)
        else:
            weights = _mixed(matrix, weights, shape, prob_mixing.KIND, True, False)
            weights = _dropped(weights, dropout, batch, heads[:, None, None], t, s, shape)
            grads = _load(grad, batch, heads, first, mask.queries, column, shape, shape.HEADS, shape.VALUE_DIM, shape.BLOCK_M, shape.BLOCK_OUT)  # fmt: skip
            acc += _head_product(weights.to(shape.DTYPE), grads, shape)
    if OF_KEYS:
        _store(
            result,
            acc * scale,
            batch,
            heads,
            start,
            mask.keys,
            column,
            shape,
            shape.DIM,
            shape.BLOCK_N,
            shape.BLOCK_OUT,
        )
    else:
        _store(
            result, acc, batch, heads, start, mask.keys, column, shape, shape.VALUE_DIM, shape.BLOCK_N, shape.BLOCK_OUT
        )
