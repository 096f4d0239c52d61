"""The kernels of the triton backend: what a program computes on a tile of queries and keys. See :mod:`.triton`.

Importing this imports triton. A tile is ``[heads, rows, keys]``, in the kernel of keys ``[heads, keys, rows]``. All heads that
mixing lets meet are in one tile; where none does, a program has one head.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

NONE, STATIC, POSITIONWISE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Kinds of mixing."""
EVERY, ALIGNED, COUNTED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Causality: hides nothing; hides s > t + offset; counts queries from 0 again, or leaves the last keys alone."""


class View(NamedTuple):
    """A tensor ``[B, heads, N, D]`` whose last dimension is contiguous: itself and its strides."""

    data: object
    batch: object
    head: object
    position: object


class Matrix(NamedTuple):
    """M of mixing, indices (b, t, j, i): the tensor, its strides, and its kind."""

    data: object
    batch: object
    position: object
    row: object
    column: object
    KIND: object


class Mask(NamedTuple):
    """Which keys each query sees, as :class:`~fairseq_lowrank.ops.attention.AttentionMask` has it."""

    queries: object
    keys: object
    positions: object
    offset: object
    appended: object
    CAUSAL: object
    padding: object
    """``[B, S]`` bytes or None."""
    additive: object
    """``[B, H, T, S]`` by its strides: bytes, floats or None."""
    batch: object
    head: object
    query: object
    key: object
    hides_from: object
    """A float mask hides where it is this or less; None where it is one of bytes."""


class Dropout(NamedTuple):
    seed: object
    rate: object
    scale: object


class Shape(NamedTuple):
    """What is known when a kernel is compiled."""

    HEADS: object
    TOGETHER: object
    """Heads of a program, padded to a power of two; 1 where heads do not meet."""
    ROWS: object
    KEYS: object
    DIM: object
    PADDED_DIM: object
    VALUE_DIM: object
    PADDED_VALUE_DIM: object
    CHUNK: object
    """Columns of the output that a program computes."""
    KEY_GROUPS: object
    VALUE_GROUPS: object
    SIGSOFTMAX: object
    DTYPE: object
    PRECISION: object
    """Of products of float32."""
    INTERPRETED: object


@triton.jit
def _place(count, shape, ROWS: tl.constexpr):
    """The first row of a program, its batch entry and its heads. The last rows, which see the most keys, come first."""
    blocks = tl.cdiv(count, ROWS)
    program = tl.program_id(0)
    start = (blocks - 1 - program % blocks) * ROWS
    entry = program // blocks
    if shape.TOGETHER == 1:
        heads = entry % shape.HEADS + tl.arange(0, 1)
        entry = entry // shape.HEADS
    else:
        heads = tl.arange(0, shape.TOGETHER)
    return start, entry, heads


@triton.jit
def _load(view, batch, heads, start, length, first, shape, GROUPS: tl.constexpr, DIM: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """``[heads, COUNT, WIDTH]`` from row ``start`` and column ``first`` on; 0 outside."""
    groups = heads
    if GROUPS != shape.HEADS:
        groups = heads * GROUPS // shape.HEADS
    rows, columns = tl.arange(0, COUNT), first + tl.arange(0, WIDTH)
    begin = tl.cast(start, tl.int64)
    origin = view.data + tl.cast(batch, tl.int64) * view.batch + begin * view.position
    offsets = groups[:, None, None] * view.head + rows[None, :, None] * view.position + columns[None, None, :]
    inside = (heads < shape.HEADS)[:, None, None] & (start + rows < length)[None, :, None]
    inside = inside & (columns < DIM)[None, None, :]
    return tl.load(origin + offsets, mask=inside, other=0.0).to(shape.DTYPE)


@triton.jit
def _store(view, values, batch, heads, start, length, first, shape, DIM: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    rows, columns = tl.arange(0, COUNT), first + tl.arange(0, WIDTH)
    begin = tl.cast(start, tl.int64)
    origin = view.data + tl.cast(batch, tl.int64) * view.batch + begin * view.position
    offsets = heads[:, None, None] * view.head + rows[None, :, None] * view.position + columns[None, None, :]
    inside = (heads < shape.HEADS)[:, None, None] & (start + rows < length)[None, :, None]
    inside = inside & (columns < DIM)[None, None, :]
    tl.store(origin + offsets, values.to(view.data.dtype.element_ty), mask=inside)


@triton.jit
def _of_rows(data, batch, heads, start, length, shape):
    """Pointers to a number a row ``[B, H, T]``, and which are inside."""
    rows = start + tl.arange(0, shape.ROWS)
    lines = tl.cast(batch, tl.int64) * shape.HEADS + heads
    return data + lines[:, None] * length + rows[None, :], (heads < shape.HEADS)[:, None] & (rows < length)[None, :]


@triton.jit
def _load_rows(data, batch, heads, start, length, shape):
    pointers, inside = _of_rows(data, batch, heads, start, length, shape)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _dot(left, right, shape):
    """left @ right in float32."""
    if shape.INTERPRETED:  # the interpreter would multiply the bits of bfloat16 as integers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision=shape.PRECISION)


@triton.jit
def _product(left, right, shape):
    """left @ right, head by head."""
    if shape.TOGETHER == 1:
        left = tl.reshape(left, (left.shape[1], left.shape[2]))
        right = tl.reshape(right, (right.shape[1], right.shape[2]))
        result = _dot(left, right, shape)[None, :, :]
    else:
        result = _dot(left, right, shape)
    return result


@triton.jit
def _flipped(tile):
    return tl.permute(tile, (0, 2, 1))


@triton.jit
def _matrix(matrix, batch, start, length, shape, OUTPUT_FIRST: tl.constexpr):
    """M as ``[H, H]``, or ``[rows, H, H]`` where it is position-wise; [i, j] if ``OUTPUT_FIRST``, else [j, i]."""
    one, other = tl.arange(0, shape.TOGETHER)[:, None], tl.arange(0, shape.TOGETHER)[None, :]
    inside = (one < shape.HEADS) & (other < shape.HEADS)
    offsets = one * matrix.row + other * matrix.column
    if OUTPUT_FIRST:
        offsets = other * matrix.row + one * matrix.column
    if matrix.KIND == NONE:
        loaded = 0
    elif matrix.KIND == STATIC:
        loaded = tl.load(matrix.data + offsets, mask=inside, other=0.0).to(tl.float32)
    else:
        rows = tl.arange(0, shape.ROWS)
        begin = tl.cast(start, tl.int64)
        origin = matrix.data + tl.cast(batch, tl.int64) * matrix.batch + begin * matrix.position
        pointers = origin + rows[:, None, None] * matrix.position + offsets[None, :, :]
        existing = (start + rows < length)[:, None, None] & inside[None, :, :]
        loaded = tl.load(pointers, mask=existing, other=0.0).to(tl.float32)
    return loaded


@triton.jit
def _mixed(matrix, tile, shape, KIND: tl.constexpr, KEYS_FIRST: tl.constexpr, EXACT: tl.constexpr):
    """Σ_j matrix[i, j] tile_j of float32 ``tile [H, rows, keys]``, or ``[H, keys, rows]``.

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
    """Σ heads_j grad_i over rows and keys, ``[H, H]``."""
    size: tl.constexpr = heads.shape[1] * heads.shape[2]
    left = tl.reshape(heads.to(shape.DTYPE), (shape.TOGETHER, size))
    right = tl.reshape(grad.to(shape.DTYPE), (shape.TOGETHER, size))
    return _dot(left, tl.trans(right), shape)


@triton.jit
def _biased(scores, mask, batch, heads, t, s, shape):
    """Scores with the additive mask, and which of them are visible. ``heads``, ``t``, ``s`` broadcast to the tile."""
    visible = (t < mask.queries) & (s < mask.keys)
    if mask.CAUSAL == ALIGNED:
        visible = visible & (s <= t + mask.offset)
    if mask.CAUSAL == COUNTED:
        visible = visible & ((s <= t % mask.positions + mask.offset) | (s >= mask.keys - mask.num_appended_keys))
    if mask.padding is not None:
        padding = tl.load(mask.padding + tl.cast(batch, tl.int64) * mask.keys + s, mask=s < mask.keys, other=1)
        visible = visible & (padding == 0)
    if mask.additive is not None:
        origin = mask.additive + tl.cast(batch, tl.int64) * mask.batch
        pointers = origin + heads * tl.cast(mask.head, tl.int64) + t * tl.cast(mask.query, tl.int64) + s * mask.key
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
    """What a softmax is taken of, −inf where hidden."""
    if shape.SIGSOFTMAX:
        scores = tl.minimum(scores, 0.0) + scores - tl.log(1.0 + tl.exp(-tl.abs(scores)))
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _dropped(tile, dropout, batch, heads, t, s, shape):
    """Dropped and scaled: a weight's fate is drawn from its place alone, so that every kernel draws the same."""
    if dropout is not None:
        here = tl.zeros(tile.shape, tl.int32)
        drawn, _, _, _ = tl.philox(dropout.seed, s + here, t + here, batch * shape.HEADS + heads + here, here)
        tile = tl.where(tl.uint_to_uniform_float(drawn) >= dropout.rate, tile * dropout.scale, 0.0)
    return tile


@triton.jit
def _last_key(start, mask, shape):
    """Where the keys end that some query of a block sees."""
    end = mask.keys
    if mask.CAUSAL == ALIGNED:
        end = tl.minimum(end, start + shape.ROWS + mask.offset)
    return end


@triton.jit
def _scored(left, right, scale, matrix, mask, batch, heads, t, s, shape, KIND: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Of a tile: scale · left rightᵀ of each head, the scores mixed and with the additive mask, and the logits."""
    unmixed = _product(left, _flipped(right), shape) * scale
    scores = _mixed(matrix, unmixed, shape, KIND, KEYS_FIRST, True)
    scores, visible = _biased(scores, mask, batch, heads[:, None, None], t, s, shape)
    return unmixed, scores, _logits(scores, visible, shape)


@triton.jit
def row_statistics(q, k, scale, before, mask, lse, shape):
    """Pass 1: the log-sum-exp of each row of logits, 0 where no key is seen."""
    start, batch, heads = _place(mask.queries, shape, shape.ROWS)
    queries = _load(q, batch, heads, start, mask.queries, 0, shape, shape.HEADS, shape.DIM, shape.ROWS, shape.PADDED_DIM)  # fmt: skip
    matrix = _matrix(before, batch, start, mask.queries, shape, True)
    t = (start + tl.arange(0, shape.ROWS))[None, :, None]
    most = tl.full((shape.TOGETHER, shape.ROWS), float("-inf"), tl.float32)
    total = tl.zeros((shape.TOGETHER, shape.ROWS), tl.float32)
    for first in range(0, _last_key(start, mask, shape), shape.KEYS):
        keys = _load(k, batch, heads, first, mask.keys, 0, shape, shape.KEY_GROUPS, shape.DIM, shape.KEYS, shape.PADDED_DIM)  # fmt: skip
        s = (first + tl.arange(0, shape.KEYS))[None, None, :]
        _, _, logits = _scored(queries, keys, scale, matrix, mask, batch, heads, t, s, shape, before.KIND, False)
        new = tl.maximum(most, tl.max(logits, 2))
        finite = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(most - finite) + tl.sum(tl.exp(logits - finite[:, :, None]), 2)
        most = new
    pointers, inside = _of_rows(lse, batch, heads, start, mask.queries, shape)
    tl.store(pointers, tl.where(total > 0, most + tl.log(tl.where(total > 0, total, 1.0)), 0.0), mask=inside)


@triton.jit
def attend(q, k, v, scale, before, mixing, mask, dropout, lse, output, shape):
    """Pass 2: P̄ V of a block of queries."""
    start, batch, heads = _place(mask.queries, shape, shape.ROWS)
    column = tl.program_id(1) * shape.CHUNK
    queries = _load(q, batch, heads, start, mask.queries, 0, shape, shape.HEADS, shape.DIM, shape.ROWS, shape.PADDED_DIM)  # fmt: skip
    before_matrix = _matrix(before, batch, start, mask.queries, shape, True)
    matrix = _matrix(mixing, batch, start, mask.queries, shape, True)
    statistics = _load_rows(lse, batch, heads, start, mask.queries, shape)[:, :, None]
    t = (start + tl.arange(0, shape.ROWS))[None, :, None]
    total = tl.zeros((shape.TOGETHER, shape.ROWS, shape.CHUNK), tl.float32)
    for first in range(0, _last_key(start, mask, shape), shape.KEYS):
        keys = _load(k, batch, heads, first, mask.keys, 0, shape, shape.KEY_GROUPS, shape.DIM, shape.KEYS, shape.PADDED_DIM)  # fmt: skip
        s = (first + tl.arange(0, shape.KEYS))[None, None, :]
        _, _, logits = _scored(queries, keys, scale, before_matrix, mask, batch, heads, t, s, shape, before.KIND, False)
        weights = tl.exp(logits - statistics)
        weights = _mixed(matrix, weights, shape, mixing.KIND, False, False)
        weights = _dropped(weights, dropout, batch, heads[:, None, None], t, s, shape)
        values = _load(v, batch, heads, first, mask.keys, column, shape, shape.VALUE_GROUPS, shape.VALUE_DIM, shape.KEYS, shape.CHUNK)  # fmt: skip
        total += _product(weights.to(shape.DTYPE), values, shape)
    _store(output, total, batch, heads, start, mask.queries, column, shape, shape.VALUE_DIM, shape.ROWS, shape.CHUNK)


@triton.jit
def row_sums(q, k, v, scale, before, mixing, mask, dropout, lse, grad, sums, mixing_grad, shape):
    """Backward, pass 1: Σ_s P ∘ dP of each row, and the gradient of M: of each query, or a block's part of it."""
    start, batch, heads = _place(mask.queries, shape, shape.ROWS)
    queries = _load(q, batch, heads, start, mask.queries, 0, shape, shape.HEADS, shape.DIM, shape.ROWS, shape.PADDED_DIM)  # fmt: skip
    grads = _load(grad, batch, heads, start, mask.queries, 0, shape, shape.HEADS, shape.VALUE_DIM, shape.ROWS, shape.PADDED_VALUE_DIM)  # fmt: skip
    before_matrix = _matrix(before, batch, start, mask.queries, shape, True)
    matrix = _matrix(mixing, batch, start, mask.queries, shape, False)
    statistics = _load_rows(lse, batch, heads, start, mask.queries, shape)[:, :, None]
    t = (start + tl.arange(0, shape.ROWS))[None, :, None]
    total = tl.zeros((shape.TOGETHER, shape.ROWS), tl.float32)
    if mixing.KIND == STATIC:
        gradient = tl.zeros((shape.TOGETHER, shape.TOGETHER), tl.float32)
    else:
        gradient = tl.zeros((shape.ROWS, shape.TOGETHER, shape.TOGETHER), tl.float32)
    for first in range(0, _last_key(start, mask, shape), shape.KEYS):
        keys = _load(k, batch, heads, first, mask.keys, 0, shape, shape.KEY_GROUPS, shape.DIM, shape.KEYS, shape.PADDED_DIM)  # fmt: skip
        s = (first + tl.arange(0, shape.KEYS))[None, None, :]
        _, _, logits = _scored(queries, keys, scale, before_matrix, mask, batch, heads, t, s, shape, before.KIND, False)
        weights = tl.exp(logits - statistics)
        values = _load(v, batch, heads, first, mask.keys, 0, shape, shape.VALUE_GROUPS, shape.VALUE_DIM, shape.KEYS, shape.PADDED_VALUE_DIM)  # fmt: skip
        grad_mixed = _product(grads, _flipped(values), shape)
        grad_mixed = _dropped(grad_mixed, dropout, batch, heads[:, None, None], t, s, shape)
        if mixing.KIND == STATIC:
            gradient += _matrix_gradient(weights, grad_mixed, shape)
            total += tl.sum(weights * _mixed(matrix, grad_mixed, shape, STATIC, False, False), 2)
        else:
            by_row = tl.permute(weights, (1, 0, 2)).to(shape.DTYPE)
            grad_by_row = tl.permute(grad_mixed, (1, 2, 0)).to(shape.DTYPE)
            gradient += _dot(by_row, grad_by_row, shape)
    pointers, inside = _of_rows(sums, batch, heads, start, mask.queries, shape)
    one, other = tl.arange(0, shape.TOGETHER)[:, None], tl.arange(0, shape.TOGETHER)[None, :]
    within = (one < shape.HEADS) & (other < shape.HEADS)
    if mixing.KIND == STATIC:
        tl.store(pointers, total, mask=inside)
        part = mixing_grad.data + tl.cast(tl.program_id(0), tl.int64) * mixing_grad.position
        tl.store(part + one * mixing_grad.row + other, gradient, mask=within)
    else:
        # Σ_s P_j dP_j = Σ_i M[j, i] dM[j, i]
        tl.store(pointers, tl.trans(tl.sum(matrix * gradient, 2)), mask=inside)
        rows = tl.arange(0, shape.ROWS)
        origin = mixing_grad.data + tl.cast(batch, tl.int64) * mixing_grad.batch
        origin += tl.cast(start, tl.int64) * mixing_grad.position
        places = rows[:, None, None] * mixing_grad.position + (one * mixing_grad.row + other)[None, :, :]
        existing = (start + rows < mask.queries)[:, None, None] & within[None, :, :]
        tl.store(origin + places, gradient.to(mixing_grad.data.dtype.element_ty), mask=existing)


@triton.jit
def _score_gradient(weights, scores, grad_mixed, matrix, statistics, shape, KIND: tl.constexpr, KEYS_FIRST: tl.constexpr):  # fmt: skip
    """dS' = P ∘ (dP − Σ_s P ∘ dP), times ds/dz of z = s + log σ(s) where sigsoftmax is."""
    grad = weights * (_mixed(matrix, grad_mixed, shape, KIND, KEYS_FIRST, False) - statistics)
    if shape.SIGSOFTMAX:
        grad = grad * (2.0 - 1.0 / (1.0 + tl.exp(-scores)))
    return grad


@triton.jit
def query_gradients(q, k, v, scale, before, mixing, mask, dropout, lse, grad, sums, grad_q, before_grad, shape):
    """Backward, pass 2: dq of a block of queries, and its part of the gradient of the matrix that mixes scores."""
    start, batch, heads = _place(mask.queries, shape, shape.ROWS)
    column = tl.program_id(1) * shape.CHUNK
    queries = _load(q, batch, heads, start, mask.queries, 0, shape, shape.HEADS, shape.DIM, shape.ROWS, shape.PADDED_DIM)  # fmt: skip
    grads = _load(grad, batch, heads, start, mask.queries, 0, shape, shape.HEADS, shape.VALUE_DIM, shape.ROWS, shape.PADDED_VALUE_DIM)  # fmt: skip
    before_matrix = _matrix(before, batch, start, mask.queries, shape, True)
    backward_matrix = _matrix(before, batch, start, mask.queries, shape, False)
    matrix = _matrix(mixing, batch, start, mask.queries, shape, False)
    statistics = _load_rows(lse, batch, heads, start, mask.queries, shape)[:, :, None]
    row_sums = _load_rows(sums, batch, heads, start, mask.queries, shape)[:, :, None]
    t = (start + tl.arange(0, shape.ROWS))[None, :, None]
    total = tl.zeros((shape.TOGETHER, shape.ROWS, shape.CHUNK), tl.float32)
    gradient = tl.zeros((shape.TOGETHER, shape.TOGETHER), tl.float32)
    for first in range(0, _last_key(start, mask, shape), shape.KEYS):
        keys = _load(k, batch, heads, first, mask.keys, 0, shape, shape.KEY_GROUPS, shape.DIM, shape.KEYS, shape.PADDED_DIM)  # fmt: skip
        values = _load(v, batch, heads, first, mask.keys, 0, shape, shape.VALUE_GROUPS, shape.VALUE_DIM, shape.KEYS, shape.PADDED_VALUE_DIM)  # fmt: skip
        s = (first + tl.arange(0, shape.KEYS))[None, None, :]
        unmixed, scores, logits = _scored(
            queries, keys, scale, before_matrix, mask, batch, heads, t, s, shape, before.KIND, False
        )
        weights = tl.exp(logits - statistics)
        grad_mixed = _product(grads, _flipped(values), shape)
        grad_mixed = _dropped(grad_mixed, dropout, batch, heads[:, None, None], t, s, shape)
        grad_scores = _score_gradient(weights, scores, grad_mixed, matrix, row_sums, shape, mixing.KIND, False)
        if before.KIND != NONE:
            gradient += _matrix_gradient(unmixed, grad_scores, shape)
            grad_scores = _mixed(backward_matrix, grad_scores, shape, before.KIND, False, False)
        if shape.CHUNK != shape.PADDED_DIM:
            keys = _load(k, batch, heads, first, mask.keys, column, shape, shape.KEY_GROUPS, shape.DIM, shape.KEYS, shape.CHUNK)  # fmt: skip
        total += _product(grad_scores.to(shape.DTYPE), keys, shape)
    _store(grad_q, total * scale, batch, heads, start, mask.queries, column, shape, shape.DIM, shape.ROWS, shape.CHUNK)
    if before.KIND != NONE and tl.program_id(1) == 0:
        one, other = tl.arange(0, shape.TOGETHER)[:, None], tl.arange(0, shape.TOGETHER)[None, :]
        within = (one < shape.HEADS) & (other < shape.HEADS)
        part = before_grad.data + tl.cast(tl.program_id(0), tl.int64) * before_grad.position
        tl.store(part + one * before_grad.row + other, gradient, mask=within)


@triton.jit
def key_gradients(q, k, v, scale, before, mixing, mask, dropout, lse, grad, sums, result, shape, OF_KEYS: tl.constexpr):
    """Backward, pass 3: dk, or dv, of a block of keys, a head each where heads share them. Tiles are ``[H, keys, rows]``."""
    start, batch, heads = _place(mask.keys, shape, shape.KEYS)
    column = tl.program_id(1) * shape.CHUNK
    keys = _load(k, batch, heads, start, mask.keys, 0, shape, shape.KEY_GROUPS, shape.DIM, shape.KEYS, shape.PADDED_DIM)  # fmt: skip
    if OF_KEYS:
        values = _load(v, batch, heads, start, mask.keys, 0, shape, shape.VALUE_GROUPS, shape.VALUE_DIM, shape.KEYS, shape.PADDED_VALUE_DIM)  # fmt: skip
    before_matrix = _matrix(before, batch, 0, mask.queries, shape, True)
    backward_matrix = _matrix(before, batch, 0, mask.queries, shape, False)
    matrix = _matrix(mixing, batch, 0, mask.queries, shape, not OF_KEYS)
    s = (start + tl.arange(0, shape.KEYS))[None, :, None]
    total = tl.zeros((shape.TOGETHER, shape.KEYS, shape.CHUNK), tl.float32)
    begin = 0
    if mask.CAUSAL == ALIGNED:
        begin = tl.maximum(start - mask.offset, 0) // shape.ROWS * shape.ROWS
    for first in range(begin, mask.queries, shape.ROWS):
        t = (first + tl.arange(0, shape.ROWS))[None, None, :]
        queries = _load(q, batch, heads, first, mask.queries, 0, shape, shape.HEADS, shape.DIM, shape.ROWS, shape.PADDED_DIM)  # fmt: skip
        if mixing.KIND == POSITIONWISE:
            matrix = _matrix(mixing, batch, first, mask.queries, shape, not OF_KEYS)
        statistics = _load_rows(lse, batch, heads, first, mask.queries, shape)[:, None, :]
        _, scores, logits = _scored(
            keys, queries, scale, before_matrix, mask, batch, heads, t, s, shape, before.KIND, True
        )
        weights = tl.exp(logits - statistics)
        if OF_KEYS:
            grads = _load(grad, batch, heads, first, mask.queries, 0, shape, shape.HEADS, shape.VALUE_DIM, shape.ROWS, shape.PADDED_VALUE_DIM)  # fmt: skip
            grad_mixed = _product(values, _flipped(grads), shape)
            grad_mixed = _dropped(grad_mixed, dropout, batch, heads[:, None, None], t, s, shape)
            row_sums = _load_rows(sums, batch, heads, first, mask.queries, shape)[:, None, :]
            grad_scores = _score_gradient(weights, scores, grad_mixed, matrix, row_sums, shape, mixing.KIND, True)
            if before.KIND != NONE:
                grad_scores = _mixed(backward_matrix, grad_scores, shape, before.KIND, True, False)
            if shape.CHUNK != shape.PADDED_DIM:
                queries = _load(q, batch, heads, first, mask.queries, column, shape, shape.HEADS, shape.DIM, shape.ROWS, shape.CHUNK)  # fmt: skip
            total += _product(grad_scores.to(shape.DTYPE), queries, shape)
        else:
            weights = _mixed(matrix, weights, shape, mixing.KIND, True, False)
            weights = _dropped(weights, dropout, batch, heads[:, None, None], t, s, shape)
            grads = _load(grad, batch, heads, first, mask.queries, column, shape, shape.HEADS, shape.VALUE_DIM, shape.ROWS, shape.CHUNK)  # fmt: skip
            total += _product(weights.to(shape.DTYPE), grads, shape)
    if OF_KEYS:
        _store(result, total * scale, batch, heads, start, mask.keys, column, shape, shape.DIM, shape.KEYS, shape.CHUNK)
    else:
        _store(result, total, batch, heads, start, mask.keys, column, shape, shape.VALUE_DIM, shape.KEYS, shape.CHUNK)
