"""The kernels of the tiled backend: what a program computes on a tile of queries and keys. See :mod:`.tiled`.

Importing this module imports triton. Where heads are mixed, a program has all of them, and a tile is ``[heads, rows, keys]``;
otherwise a program has one head, and a tile is ``[rows, keys]``. In the pass over queries of a block of keys the two last axes
change places. Names are those of :mod:`.kernels`. Exponentials have base 2: scores carry the factor log₂ e, and so does ``lse``.

A block of queries sees three ranges of keys: tiles at the left edge of a window, tiles that all its rows see, and tiles at the
diagonal or the end. Only the first and the last range are masked.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import triton
import triton.language as tl

from fairseq_lowrank.ops.attention.kernels import NONE, POSITIONWISE, STATIC

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LN_2, LOG2_E = tl.constexpr(0.6931471805599453), tl.constexpr(1.4426950408889634)
NOTHING, OF_KEYS, OF_VALUES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What the pass of statistics averages with the probabilities; what the pass over queries accumulates (0: both)."""


class Mask(NamedTuple):
    """Which keys each query sees."""

    queries: Any
    keys: Any
    offset: Any
    """Query t sees keys up to t + offset."""
    window: Any
    """The last so many of them, or None."""
    CAUSAL: Any
    COUNTED: Any
    """Whether causality counts queries again after each ``positions``, or shows the ``appended`` last keys to all."""
    positions: Any
    appended: Any
    lengths: Any
    """``[B]`` numbers of keys up to the last visible one, or None."""
    padding: Any
    """``[B, S]`` bytes, or None where ``lengths`` say all."""
    additive: Any
    """``[B, H, T, S]`` by its strides: bytes that hide, floats, or None."""
    batch: Any
    head: Any
    query: Any
    key: Any
    hides_from: Any
    """A float mask hides where it is this or less; None where it is one of bytes."""
    BY_HEAD: Any
    """Whether the additive mask differs between heads."""


class Dropout(NamedTuple):
    seed: Any
    threshold: Any
    """Of 65,536 numbers, so many drop a weight."""
    scale: Any


class Shape(NamedTuple):
    """What is known when a kernel is compiled."""

    HEADS: Any
    BLOCK_H: Any
    """Heads of a program, padded to a power of two; 1 if heads are not mixed."""
    COPIES: Any
    """Of M on the diagonal of the left factor, which needs 16 rows. Each copy mixes its part of the rows of a tile."""
    BLOCK_M: Any
    BLOCK_N: Any
    DIM: Any
    BLOCK_D: Any
    VALUE_DIM: Any
    BLOCK_DV: Any
    KEY_GROUPS: Any
    VALUE_GROUPS: Any
    SIGSOFTMAX: Any
    DTYPE: Any
    STAGES: Any
    CHUNK: Any
    """Columns of a part of the products q·k and do·v, where shared memory does not hold all; 0: all at once."""
    PARTS: Any
    """Products that share the positions of a tile in the gradient of M: one a warp."""
    WIDE: Any
    """Whether a batch entry spans more than 32-bit offsets reach."""


@triton.jit
def _place(shape, blocks):
    """Return the block of a program, its batch entry and its heads: a vector, or a number where heads are not mixed."""
    block, entry = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    if shape.BLOCK_H == 1:
        heads = entry % shape.HEADS
        entry = entry // shape.HEADS
    else:
        heads = tl.arange(0, shape.BLOCK_H)
    return block, tl.cast(entry, tl.int64), heads


@triton.jit
def _pointers(view, batch, heads, start, shape, GROUPS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, COLUMN: tl.constexpr = 0):  # fmt: skip
    """Return pointers to ``COUNT`` positions from ``start`` on and ``WIDTH`` features from ``COLUMN`` on of each head's group."""
    groups = heads
    if GROUPS != shape.HEADS:
        groups = heads * GROUPS // shape.HEADS
    if shape.WIDE or shape.BLOCK_H == 1:
        groups = tl.cast(groups, tl.int64)
    origin = view.data + batch * view.batch + tl.cast(start, tl.int64) * view.position
    inner = tl.arange(0, COUNT)[:, None] * view.position + (tl.arange(0, WIDTH) + COLUMN)[None, :]
    if shape.BLOCK_H == 1:
        pointers = (origin + groups * view.head) + inner
    else:
        pointers = origin + (groups[:, None, None] * view.head + inner[None, :, :])
    return pointers


@triton.jit
def _inside(heads, start, length, shape, DIM: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, COLUMN: tl.constexpr = 0):  # fmt: skip
    inside = (start + tl.arange(0, COUNT) < length)[:, None] & (tl.arange(0, WIDTH) + COLUMN < DIM)[None, :]
    if shape.BLOCK_H > 1:
        inside = inside[None, :, :] & (heads < shape.HEADS)[:, None, None]
    return inside


@triton.jit
def _rows(view, batch, heads, start, length, shape, GROUPS: tl.constexpr, DIM: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, COLUMN: tl.constexpr = 0):  # fmt: skip
    """Load ``COUNT`` positions of the heads from ``start`` on; 0 outside. All positions are inside unless ``MASKED``."""
    pointers = _pointers(view, batch, heads, start, shape, GROUPS, COUNT, WIDTH, COLUMN)
    if MASKED or DIM % WIDTH != 0 or (shape.BLOCK_H > 1 and shape.BLOCK_H != shape.HEADS):
        loaded = tl.load(pointers, mask=_inside(heads, start, length, shape, DIM, COUNT, WIDTH, COLUMN), other=0.0)
    else:
        loaded = tl.load(pointers)
    return loaded


@triton.jit
def _store(view, values, batch, heads, start, length, shape, DIM: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    pointers = _pointers(view, batch, heads, start, shape, shape.HEADS, COUNT, WIDTH)
    inside = _inside(heads, start, length, shape, DIM, COUNT, WIDTH)
    tl.store(pointers, values.to(view.data.dtype.element_ty), mask=inside)


@triton.jit
def _numbers(data, batch, heads, start, length, shape, COUNT: tl.constexpr):
    """Return pointers to a number for each row ``[B, H, T]``, and which are inside."""
    rows = start + tl.arange(0, COUNT)
    if shape.BLOCK_H == 1:
        pointers, inside = data + (batch * shape.HEADS + heads) * length + rows, rows < length
    else:
        pointers = data + (batch * shape.HEADS + heads)[:, None] * length + rows[None, :]
        inside = (rows < length)[None, :] & (heads < shape.HEADS)[:, None]
    return pointers, inside


@triton.jit
def _load_numbers(data, batch, heads, start, length, shape, COUNT: tl.constexpr, MASKED: tl.constexpr):
    pointers, inside = _numbers(data, batch, heads, start, length, shape, COUNT)
    if MASKED or (shape.BLOCK_H > 1 and shape.BLOCK_H != shape.HEADS):
        loaded = tl.load(pointers, mask=inside, other=0.0)
    else:
        loaded = tl.load(pointers)
    return loaded


@triton.jit
def _dot(left, right):
    """Return left @ right in float32."""
    if INTERPRETED:  # the interpreter would multiply the bits of bfloat16 as integers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right)


@triton.jit
def _transposed(tile):
    return tl.permute(tile, (1, 0) if len(tile.shape) == 2 else (0, 2, 1))


@triton.jit
def _product(fixed, moving, left, right, batch, heads, start, first, left_length, right_length, shape, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Return fixed @ movingᵀ; in parts of the columns, which are loaded from ``left`` and ``right``, where there are chunks."""
    if shape.CHUNK == 0:
        result = _dot(fixed, _transposed(moving))
    else:
        result = tl.zeros((shape.BLOCK_H, shape.BLOCK_M, shape.BLOCK_N), tl.float32)
        for part in tl.static_range(WIDTH // shape.CHUNK):
            one = _rows(left, batch, heads, start, left_length, shape, shape.HEADS, DIM, shape.BLOCK_M, shape.CHUNK, True, part * shape.CHUNK)  # fmt: skip
            other = _rows(right, batch, heads, first, right_length, shape, GROUPS, DIM, shape.BLOCK_N, shape.CHUNK, MASKED, part * shape.CHUNK)  # fmt: skip
            result += _dot(one, _transposed(other))
    return result


@triton.jit
def _matrix(matrix, batch, start, length, shape, OUTPUT_FIRST: tl.constexpr):
    """Load M in float32, [i, j] if ``OUTPUT_FIRST``, else [j, i]: on a diagonal as often as there are copies, or a matrix a row."""
    if matrix.KIND == STATIC:
        side = tl.arange(0, shape.COPIES * shape.BLOCK_H)
        copy, head = side // shape.BLOCK_H, side % shape.BLOCK_H
        inside = (copy[:, None] == copy[None, :]) & (head < shape.HEADS)[:, None] & (head < shape.HEADS)[None, :]
        offsets = head[:, None] * matrix.row + head[None, :] * matrix.column
        if OUTPUT_FIRST:
            offsets = head[None, :] * matrix.row + head[:, None] * matrix.column
        loaded = tl.load(matrix.data + offsets, mask=inside, other=0.0).to(tl.float32)
    elif matrix.KIND == POSITIONWISE:
        head, rows = tl.arange(0, shape.BLOCK_H), tl.arange(0, shape.BLOCK_M)
        offsets = head[:, None] * matrix.row + head[None, :] * matrix.column
        if OUTPUT_FIRST:
            offsets = head[None, :] * matrix.row + head[:, None] * matrix.column
        inside = (head < shape.HEADS)[:, None] & (head < shape.HEADS)[None, :]
        origin = matrix.data + batch * matrix.batch + tl.cast(start, tl.int64) * matrix.position
        pointers = origin + rows[:, None, None] * matrix.position + offsets[None, :, :]
        existing = (start + rows < length)[:, None, None] & inside[None, :, :]
        loaded = tl.load(pointers, mask=existing, other=0.0).to(tl.float32)
    else:
        loaded = 0.0
    return loaded


@triton.jit
def _by_copy(tile, shape):
    """Reshape ``[heads, a, b]`` to ``[copies · heads, a · b / copies]``."""
    positions: tl.constexpr = tile.shape[1] * tile.shape[2] // shape.COPIES
    if shape.COPIES > 1:
        tile = tl.permute(tl.reshape(tile, (shape.BLOCK_H, shape.COPIES, positions)), (1, 0, 2))
    return tl.reshape(tile, (shape.COPIES * shape.BLOCK_H, positions))


@triton.jit
def _mixed(matrix, tile, shape, KIND: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Return Σ_j matrix[i, j] tile_j in float32, the products in the dtype of the operation."""
    if KIND == NONE:
        mixed = tile.to(tl.float32)
    elif KIND == STATIC:
        flat = _dot(matrix.to(shape.DTYPE), _by_copy(tile.to(shape.DTYPE), shape))
        if shape.COPIES > 1:
            positions: tl.constexpr = tile.shape[1] * tile.shape[2] // shape.COPIES
            flat = tl.permute(tl.reshape(flat, (shape.COPIES, shape.BLOCK_H, positions)), (1, 0, 2))
        mixed = tl.reshape(flat, tile.shape)
    elif KEYS_FIRST:
        rows = _dot(matrix.to(shape.DTYPE), tl.permute(tile.to(shape.DTYPE), (2, 0, 1)))
        mixed = tl.permute(rows, (1, 2, 0))
    else:
        rows = _dot(matrix.to(shape.DTYPE), tl.permute(tile.to(shape.DTYPE), (1, 0, 2)))
        mixed = tl.permute(rows, (1, 0, 2))
    return mixed


@triton.jit
def _mixed_scores(matrix, scores, shape, KIND: tl.constexpr):
    """Return mixed scores to float32: each factor in two parts, without the product of the small ones."""
    if KIND != NONE:
        large = matrix.to(shape.DTYPE).to(tl.float32)
        high = scores.to(shape.DTYPE).to(tl.float32)
        mixed = _mixed(matrix - large, high, shape, KIND, False) + _mixed(large, scores - high, shape, KIND, False)
        scores = mixed + _mixed(large, high, shape, KIND, False)
    return scores


@triton.jit
def _by_position(t, s, mask):
    """Return which keys causality and the window show to queries."""
    last = t + mask.offset
    if mask.COUNTED:
        last = t % mask.positions + mask.offset
    visible = s <= last
    if mask.window is not None:
        visible = visible & (s > last - mask.window)
    if mask.COUNTED:
        visible = visible | (s >= mask.keys - mask.appended)
    return visible


@triton.jit
def _visible(scores, mask, batch, t, s, length, MASKED: tl.constexpr):
    """Return scores with −inf where a key is hidden. ``t`` and ``s`` broadcast to two dimensions, which are the last ones."""
    if mask.padding is not None:
        hidden = tl.load(mask.padding + batch * mask.keys + s, mask=s < mask.keys, other=1)
        visible = hidden == 0
        if len(scores.shape) == 3:
            visible = visible[None, :, :]
        scores = tl.where(visible, scores, float("-inf"))
    if MASKED:
        visible = s < length
        if mask.CAUSAL:
            visible = visible & _by_position(t, s, mask)
        if len(scores.shape) == 3:
            visible = visible[None, :, :]
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def _biased(scores, mask, batch, heads, t, s, shape, KEYS_FIRST: tl.constexpr):
    """Return scores with the additive mask of the queries from ``t`` and the keys from ``s`` on, −inf where it hides."""
    if mask.additive is not None:
        rows, keys = tl.arange(0, shape.BLOCK_M), tl.arange(0, shape.BLOCK_N)
        row, key = rows[:, None], keys[None, :]
        if KEYS_FIRST:
            row, key = rows[None, :], keys[:, None]
        origin = (
            mask.additive + batch * mask.batch + tl.cast(t, tl.int64) * mask.query + tl.cast(s, tl.int64) * mask.key
        )
        inside, offsets = (t + row < mask.queries) & (s + key < mask.keys), row * mask.query + key * mask.key
        places = tl.cast(heads, tl.int64) * mask.head
        if shape.BLOCK_H == 1:
            origin += places
        elif mask.BY_HEAD:
            inside, offsets = inside[None, :, :] & (heads < shape.HEADS)[:, None, None], offsets[None, :, :] + places[:, None, None]  # fmt: skip
        else:
            inside, offsets = inside[None, :, :], offsets[None, :, :]
        if mask.hides_from is None:
            scores = tl.where(tl.load(origin + offsets, mask=inside, other=1) == 0, scores, float("-inf"))
        else:
            bias = tl.load(origin + offsets, mask=inside, other=0.0).to(tl.float32)
            scores = tl.where(bias > mask.hides_from, scores + bias * LOG2_E, float("-inf"))
    return scores


@triton.jit
def _logit(level, shape):
    """Return the logit of a score; that of sigsoftmax without −log₂(1 + 2^−|s|), which is at most 1."""
    if shape.SIGSOFTMAX:
        level = level + tl.minimum(level, 0.0)
    return level


@triton.jit
def _level(logit, shape):
    """Return the score of a logit: the inverse of :func:`_logit`."""
    if shape.SIGSOFTMAX:
        logit = tl.where(logit > 0, logit, 0.5 * logit)
    return logit


@triton.jit
def _powers(scores, level, shape):
    """Return 2^(logit of a score − _logit(level)), and the derivative of logits by scores: 1, or for sigsoftmax 2 − σ(s).

    With a = 2^(s − level), sigsoftmax is a² / (a·x + y) and σ(s) = a·x / (a·x + y), where x / y = 2^level and the larger of both
    is 1. So each score takes one exponential and one root, and nothing overflows if no score is much above the level.
    """
    weights, slope = tl.exp2(scores - level), 1.0
    if shape.SIGSOFTMAX:
        small = tl.exp2(-tl.minimum(tl.abs(level), 100.0))
        x, y = tl.where(level > 0, 1.0, small), tl.where(level > 0, small, 1.0)
        root = tl.rsqrt(weights * x + y)
        weights = weights * root
        slope = 2.0 - weights * root * x
        weights = weights * weights
    return weights, slope


@triton.jit
def _dropped(tile, dropout, batch, heads, t, s, shape, ROWS: tl.constexpr, KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr):  # fmt: skip
    """Return dropped and scaled weights of the queries from ``t`` and the keys from ``s`` on.

    Eight neighbouring keys share a draw of 128 bits, 16 for each. The mask depends only on the position of a weight, so all
    kernels draw the same.
    """
    if dropout is not None:
        rows, groups = t + tl.arange(0, ROWS), s // 8 + tl.arange(0, KEYS // 8)
        line = tl.cast(batch, tl.int32) * shape.HEADS + heads
        if KEYS_FIRST:
            row, group = rows[None, :], groups[:, None]
        else:
            row, group = rows[:, None], groups[None, :]
        nothing = (row + group) * 0
        if shape.BLOCK_H > 1:
            row, group, line = row[None, :, :], group[None, :, :], line[:, None, None]
            nothing = nothing[None, :, :] + line * 0
        a, b, c, d = tl.philox(dropout.seed, group + nothing, row + nothing, line + nothing, nothing)
        low, high = _halves(a, b, c, d, dropout.threshold)
        kept = tl.join(low, high)  # […, 2, 2, 2]
        if shape.BLOCK_H > 1:
            if KEYS_FIRST:
                kept = tl.permute(kept, (0, 1, 3, 4, 5, 2))
        elif KEYS_FIRST:
            kept = tl.permute(kept, (0, 2, 3, 4, 1))
        tile = tl.where(tl.reshape(kept, tile.shape), tile * dropout.scale, 0.0)
    return tile


@triton.jit
def _halves(a, b, c, d, threshold):
    """Return which of the lower and upper 16 bits of four numbers keep a weight."""
    low = tl.join(tl.join((a & 0xFFFF) >= threshold, (b & 0xFFFF) >= threshold), tl.join((c & 0xFFFF) >= threshold, (d & 0xFFFF) >= threshold))  # fmt: skip
    high = tl.join(tl.join((a >> 16) >= threshold, (b >> 16) >= threshold), tl.join((c >> 16) >= threshold, (d >> 16) >= threshold))  # fmt: skip
    return low, high


@triton.jit
def _matrix_gradient(heads, grad, shape):
    """Return Σ heads_j grad_i over rows and keys, ``[parts, H, H]``: a warp has a part of the positions."""
    positions: tl.constexpr = heads.shape[1] * heads.shape[2] // shape.PARTS
    left = tl.permute(tl.reshape(heads.to(shape.DTYPE), (shape.BLOCK_H, shape.PARTS, positions)), (1, 0, 2))
    right = tl.permute(tl.reshape(grad.to(shape.DTYPE), (shape.BLOCK_H, shape.PARTS, positions)), (1, 2, 0))
    return _dot(left, right)


@triton.jit
def _length(mask, batch):
    """Return the number of keys up to the last visible one of a batch entry."""
    length = mask.keys
    if mask.lengths is not None:
        length = tl.load(mask.lengths + batch)
    return length


@triton.jit
def _key_edges(start, length, mask, M: tl.constexpr, N: tl.constexpr):
    """Return four edges of keys for the queries from ``start`` on: tiles between the second and the third are seen whole."""
    begin, whole, middle, end = 0, length // N * N, 0, length
    if mask.COUNTED:
        whole = 0
    elif mask.CAUSAL:
        end = tl.maximum(tl.minimum(end, start + M + mask.offset), 0)
        whole = tl.maximum(tl.minimum(length, start + mask.offset + 1), 0) // N * N
        if mask.window is not None:
            begin = tl.maximum(start + mask.offset - mask.window + 1, 0) // N * N
            middle = tl.cdiv(tl.maximum(start + M + mask.offset - mask.window, 0), N) * N
            whole = tl.maximum(whole, middle)
    return begin, tl.minimum(middle, tl.cdiv(end, N) * N), tl.minimum(whole, tl.cdiv(end, N) * N), end


@triton.jit
def _query_edges(start, length, mask, M: tl.constexpr, N: tl.constexpr):
    """Return four edges of queries for the keys from ``start`` on: tiles between the second and the third see them whole."""
    begin, middle, whole, end = 0, 0, mask.queries // M * M, mask.queries
    if mask.COUNTED:
        whole = 0
    elif mask.CAUSAL:
        begin = tl.maximum(start - mask.offset, 0) // M * M
        middle = tl.cdiv(tl.maximum(start + N - 1 - mask.offset, 0), M) * M
        if mask.window is not None:
            end = tl.maximum(tl.minimum(end, start + N - 1 - mask.offset + mask.window), 0)
            whole = tl.minimum(whole, tl.maximum(start - mask.offset + mask.window, 0) // M * M)
    if mask.lengths is not None:
        end = tl.where(start < length, end, 0)
    middle = tl.minimum(middle, tl.cdiv(end, M) * M)
    return begin, middle, tl.minimum(tl.maximum(whole, middle), tl.cdiv(end, M) * M), end


@triton.jit
def _statistics_tile(m_i, l_i, acc, queries, matrix, k, v, batch, heads, start, first, length, factor, mask, dropout, shape, KIND: tl.constexpr, AVERAGE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    keys = _rows(k, batch, heads, first, mask.keys, shape, shape.KEY_GROUPS, shape.DIM, shape.BLOCK_N, shape.BLOCK_D, MASKED)  # fmt: skip
    t, s = start + tl.arange(0, shape.BLOCK_M), first + tl.arange(0, shape.BLOCK_N)
    scores = _mixed_scores(matrix, _dot(queries, _transposed(keys)) * factor, shape, KIND)
    scores = _biased(scores, mask, batch, heads, start, first, shape, False)
    scores = _visible(scores, mask, batch, t[:, None], s[None, :], length, MASKED)
    new = tl.maximum(m_i, tl.max(scores, len(scores.shape) - 1))
    finite = new
    if MASKED or mask.padding is not None or mask.additive is not None:
        finite = tl.where(new == float("-inf"), 0.0, new)
    weights, slope = _powers(scores, tl.expand_dims(finite, -1), shape)
    shrink = tl.exp2(_logit(m_i, shape) - _logit(finite, shape))
    l_i = l_i * shrink + tl.sum(weights, len(scores.shape) - 1)
    if AVERAGE == OF_KEYS:
        acc = acc * tl.expand_dims(shrink, -1) + _dot((weights * slope).to(shape.DTYPE), keys)
    if AVERAGE == OF_VALUES:
        values = _rows(v, batch, heads, first, mask.keys, shape, shape.VALUE_GROUPS, shape.VALUE_DIM, shape.BLOCK_N, shape.BLOCK_DV, MASKED)  # fmt: skip
        weights = _dropped(weights, dropout, batch, heads, start, first, shape, shape.BLOCK_M, shape.BLOCK_N, False)
        acc = acc * tl.expand_dims(shrink, -1) + _dot(weights.to(shape.DTYPE), values)
    return new, l_i, acc


@triton.jit
def statistics(q, k, v, factor, score_mixing, mask, dropout, lse, average, shape, AVERAGE: tl.constexpr):
    """Compute the log-sum-exp of each row of logits, 0 where no key is seen, and an average with the unmixed probabilities.

    ``AVERAGE``: of keys, each times the derivative of its logit by its score, which the backward pass of mixing reads; of values,
    which is the output where heads are not mixed; or of nothing.
    """
    block, batch, heads = _place(shape, tl.cdiv(mask.queries, shape.BLOCK_M))
    start = (tl.cdiv(mask.queries, shape.BLOCK_M) - 1 - block) * shape.BLOCK_M
    queries = _rows(q, batch, heads, start, mask.queries, shape, shape.HEADS, shape.DIM, shape.BLOCK_M, shape.BLOCK_D, True)  # fmt: skip
    matrix = _matrix(score_mixing, batch, start, mask.queries, shape, True)
    length = _length(mask, batch)
    WIDTH: tl.constexpr = shape.BLOCK_DV if AVERAGE == OF_VALUES else shape.BLOCK_D
    if shape.BLOCK_H == 1:
        m_i = tl.full((shape.BLOCK_M,), float("-inf"), tl.float32)
        acc = tl.zeros((shape.BLOCK_M, WIDTH), tl.float32)
    else:
        m_i = tl.full((shape.BLOCK_H, shape.BLOCK_M), float("-inf"), tl.float32)
        acc = tl.zeros((shape.BLOCK_H, shape.BLOCK_M, WIDTH), tl.float32)
    l_i = tl.zeros_like(m_i)
    edges = _key_edges(start, length, mask, shape.BLOCK_M, shape.BLOCK_N)
    for part in tl.static_range(3):
        if part > 0 or mask.window is not None:
            for first in tl.range(edges[part], edges[part + 1], shape.BLOCK_N, num_stages=shape.STAGES):
                m_i, l_i, acc = _statistics_tile(m_i, l_i, acc, queries, matrix, k, v, batch, heads, start, first, length, factor, mask, dropout, shape, score_mixing.KIND, AVERAGE, part != 1)  # fmt: skip
    seen = tl.where(l_i > 0, l_i, 1.0)
    pointers, inside = _numbers(lse, batch, heads, start, mask.queries, shape, shape.BLOCK_M)
    tl.store(pointers, tl.where(l_i > 0, _logit(m_i, shape) + tl.log2(seen), 0.0), mask=inside)
    if AVERAGE != NOTHING:
        WANTED: tl.constexpr = shape.VALUE_DIM if AVERAGE == OF_VALUES else shape.DIM
        acc = acc / tl.expand_dims(seen, -1)
        _store(average, acc, batch, heads, start, mask.queries, shape, WANTED, shape.BLOCK_M, WIDTH)


@triton.jit
def _attend_tile(acc, queries, lse, score_matrix, matrix, k, v, batch, heads, start, first, length, factor, mask, dropout, shape, SCORE_KIND: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    keys = _rows(k, batch, heads, first, mask.keys, shape, shape.KEY_GROUPS, shape.DIM, shape.BLOCK_N, shape.BLOCK_D, MASKED)  # fmt: skip
    values = _rows(v, batch, heads, first, mask.keys, shape, shape.VALUE_GROUPS, shape.VALUE_DIM, shape.BLOCK_N, shape.BLOCK_DV, MASKED)  # fmt: skip
    t, s = start + tl.arange(0, shape.BLOCK_M), first + tl.arange(0, shape.BLOCK_N)
    scores = _mixed_scores(score_matrix, _dot(queries, _transposed(keys)) * factor, shape, SCORE_KIND)
    scores = _biased(scores, mask, batch, heads, start, first, shape, False)
    scores = _visible(scores, mask, batch, t[:, None], s[None, :], length, MASKED)
    weights, _ = _powers(scores, _level(lse, shape), shape)
    weights = _mixed(matrix, weights.to(shape.DTYPE), shape, KIND, False)
    weights = _dropped(weights, dropout, batch, heads, start, first, shape, shape.BLOCK_M, shape.BLOCK_N, False)
    return acc + _dot(weights.to(shape.DTYPE), values)


@triton.jit
def attend(q, k, v, factor, score_mixing, prob_mixing, mask, dropout, lse, output, shape):
    """Compute P̄ V of a block of queries, all heads."""
    block, batch, heads = _place(shape, tl.cdiv(mask.queries, shape.BLOCK_M))
    start = (tl.cdiv(mask.queries, shape.BLOCK_M) - 1 - block) * shape.BLOCK_M
    queries = _rows(q, batch, heads, start, mask.queries, shape, shape.HEADS, shape.DIM, shape.BLOCK_M, shape.BLOCK_D, True)  # fmt: skip
    score_matrix = _matrix(score_mixing, batch, start, mask.queries, shape, True)
    matrix = _matrix(prob_mixing, batch, start, mask.queries, shape, True)
    lse_i = tl.expand_dims(_load_numbers(lse, batch, heads, start, mask.queries, shape, shape.BLOCK_M, True), -1)
    acc = tl.zeros((shape.BLOCK_H, shape.BLOCK_M, shape.BLOCK_DV), tl.float32)
    length = _length(mask, batch)
    edges = _key_edges(start, length, mask, shape.BLOCK_M, shape.BLOCK_N)
    for part in tl.static_range(3):
        if part > 0 or mask.window is not None:
            for first in tl.range(edges[part], edges[part + 1], shape.BLOCK_N, num_stages=shape.STAGES):
                acc = _attend_tile(acc, queries, lse_i, score_matrix, matrix, k, v, batch, heads, start, first, length, factor, mask, dropout, shape, score_mixing.KIND, prob_mixing.KIND, part != 1)  # fmt: skip
    _store(output, acc, batch, heads, start, mask.queries, shape, shape.VALUE_DIM, shape.BLOCK_M, shape.BLOCK_DV)


@triton.jit
def _query_tile(acc, sums, gradient, of_scores, queries, grads, lse, given, score_matrix, score_backward, matrix, q, k, v, grad, batch, heads, start, first, length, factor, mask, dropout, shape, SCORE_KIND: tl.constexpr, KIND: tl.constexpr, GIVEN: tl.constexpr, OF_QUERIES: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    keys = _rows(k, batch, heads, first, mask.keys, shape, shape.KEY_GROUPS, shape.DIM, shape.BLOCK_N, shape.BLOCK_D, MASKED)  # fmt: skip
    values = 0.0
    if shape.CHUNK == 0:
        values = _rows(v, batch, heads, first, mask.keys, shape, shape.VALUE_GROUPS, shape.VALUE_DIM, shape.BLOCK_N, shape.BLOCK_DV, MASKED)  # fmt: skip
    t, s = start + tl.arange(0, shape.BLOCK_M), first + tl.arange(0, shape.BLOCK_N)
    unmixed = _product(queries, keys, q, k, batch, heads, start, first, mask.queries, mask.keys, shape, shape.KEY_GROUPS, shape.DIM, shape.BLOCK_D, MASKED) * factor  # fmt: skip
    scores = _mixed_scores(score_matrix, unmixed, shape, SCORE_KIND)
    scores = _biased(scores, mask, batch, heads, start, first, shape, False)
    scores = _visible(scores, mask, batch, t[:, None], s[None, :], length, MASKED)
    weights, slope = _powers(scores, _level(lse, shape), shape)
    grad_mixed = _product(grads, values, grad, v, batch, heads, start, first, mask.queries, mask.keys, shape, shape.VALUE_GROUPS, shape.VALUE_DIM, shape.BLOCK_DV, MASKED)  # fmt: skip
    grad_mixed = _dropped(grad_mixed, dropout, batch, heads, start, first, shape, shape.BLOCK_M, shape.BLOCK_N, False)
    if KIND != NONE:
        grad_mixed = grad_mixed.to(shape.DTYPE)
    if not (GIVEN or KIND == NONE):
        if KIND == STATIC:
            gradient += _matrix_gradient(weights, grad_mixed, shape)
        else:
            by_row = tl.permute(weights.to(shape.DTYPE), (1, 0, 2))
            gradient += _dot(by_row, tl.permute(grad_mixed, (1, 2, 0)))
    product = _mixed(matrix, grad_mixed, shape, KIND, False)
    if GIVEN:
        product = weights * (product - given)
    else:
        product = weights * product
        # Row sums by a product with ones: no shuffles, and of the rounded numbers that acc has.
        ones = tl.full((shape.BLOCK_H, shape.BLOCK_N, 8), 1.0, tl.float32).to(shape.DTYPE)
        sums += _dot(product.to(shape.DTYPE), ones)
    if OF_QUERIES:
        product = product * slope
        if SCORE_KIND != NONE:
            of_scores += _matrix_gradient(unmixed, product, shape)
            product = _mixed(score_backward, product, shape, SCORE_KIND, False)
        acc += _dot(product.to(shape.DTYPE), keys)
    return acc, sums, gradient, of_scores


@triton.jit
def query_pass(q, k, v, factor, scale, score_mixing, prob_mixing, mask, dropout, lse, grad, average, sums, grad_q, prob_mixing_grad, score_mixing_grad, shape, GIVEN: tl.constexpr):  # fmt: skip
    """Compute D = Σ_s P ∘ dP of each row, the gradient of M and dq of a block of queries, all in one pass.

    dq_j = Σ_s P_j (dP_j − D_j) k_s = Σ_s P_j dP_j k_s − D_j C_j, where C_j = Σ_s P_j k_s is ``average``. If ``GIVEN``, D comes
    from ``sums`` instead, the gradient of M from elsewhere, and the gradient of a matrix that mixes scores is computed too.
    Without ``grad_q`` only D and the gradient of M are computed.
    """
    block, batch, heads = _place(shape, tl.cdiv(mask.queries, shape.BLOCK_M))
    start = (tl.cdiv(mask.queries, shape.BLOCK_M) - 1 - block) * shape.BLOCK_M
    queries = 0.0
    grads = 0.0
    if shape.CHUNK == 0:
        queries = _rows(q, batch, heads, start, mask.queries, shape, shape.HEADS, shape.DIM, shape.BLOCK_M, shape.BLOCK_D, True)  # fmt: skip
        grads = _rows(grad, batch, heads, start, mask.queries, shape, shape.HEADS, shape.VALUE_DIM, shape.BLOCK_M, shape.BLOCK_DV, True)  # fmt: skip
    score_matrix = _matrix(score_mixing, batch, start, mask.queries, shape, True)
    score_backward = _matrix(score_mixing, batch, start, mask.queries, shape, False)
    matrix = _matrix(prob_mixing, batch, start, mask.queries, shape, False)
    lse_i = tl.expand_dims(_load_numbers(lse, batch, heads, start, mask.queries, shape, shape.BLOCK_M, True), -1)
    given = 0.0
    if GIVEN:
        given = tl.expand_dims(_load_numbers(sums, batch, heads, start, mask.queries, shape, shape.BLOCK_M, True), -1)
    if shape.BLOCK_H == 1:
        acc = tl.zeros((shape.BLOCK_M, shape.BLOCK_D), tl.float32)
    else:
        acc = tl.zeros((shape.BLOCK_H, shape.BLOCK_M, shape.BLOCK_D), tl.float32)
    row_sums = tl.zeros((shape.BLOCK_H, shape.BLOCK_M, 8), tl.float32)
    of_scores = tl.zeros((shape.PARTS, shape.BLOCK_H, shape.BLOCK_H), tl.float32)
    gradient = of_scores
    if prob_mixing.KIND == POSITIONWISE:
        gradient = tl.zeros((shape.BLOCK_M, shape.BLOCK_H, shape.BLOCK_H), tl.float32)
    length = _length(mask, batch)
    edges = _key_edges(start, length, mask, shape.BLOCK_M, shape.BLOCK_N)
    for part in tl.static_range(3):
        if part > 0 or mask.window is not None:
            for first in tl.range(edges[part], edges[part + 1], shape.BLOCK_N, num_stages=shape.STAGES):
                acc, row_sums, gradient, of_scores = _query_tile(acc, row_sums, gradient, of_scores, queries, grads, lse_i, given, score_matrix, score_backward, matrix, q, k, v, grad, batch, heads, start, first, length, factor, mask, dropout, shape, score_mixing.KIND, prob_mixing.KIND, GIVEN, grad_q is not None, part != 1)  # fmt: skip
    if not GIVEN:
        total = tl.max(row_sums, 2)  # 8 equal columns
        pointers, inside = _numbers(sums, batch, heads, start, mask.queries, shape, shape.BLOCK_M)
        tl.store(pointers, total, mask=inside)
        if prob_mixing.KIND == STATIC:
            _store_matrix(prob_mixing_grad, tl.sum(gradient, 0), shape)
        else:
            _store_matrices(prob_mixing_grad, gradient, batch, start, mask.queries, shape)
    if grad_q is not None:
        if not GIVEN:
            middle = _rows(average, batch, heads, start, mask.queries, shape, shape.HEADS, shape.DIM, shape.BLOCK_M, shape.BLOCK_D, True)  # fmt: skip
            acc = acc - tl.expand_dims(total, -1) * middle.to(tl.float32)
        _store(grad_q, acc * scale, batch, heads, start, mask.queries, shape, shape.DIM, shape.BLOCK_M, shape.BLOCK_D)
        if score_mixing.KIND != NONE:
            _store_matrix(score_mixing_grad, tl.sum(of_scores, 0) * LN_2, shape)


@triton.jit
def _store_matrix(matrix, gradient, shape):
    """Store a program's part of the gradient of one M."""
    head = tl.arange(0, shape.BLOCK_H)
    inside = (head < shape.HEADS)[:, None] & (head < shape.HEADS)[None, :]
    part = matrix.data + tl.cast(tl.program_id(0), tl.int64) * matrix.position
    tl.store(part + head[:, None] * matrix.row + head[None, :], gradient, mask=inside)


@triton.jit
def _store_matrices(matrix, gradient, batch, start, length, shape):
    """Store the gradient of the matrices of a block of queries."""
    head, rows = tl.arange(0, shape.BLOCK_H), tl.arange(0, shape.BLOCK_M)
    inside = (head < shape.HEADS)[:, None] & (head < shape.HEADS)[None, :]
    origin = matrix.data + batch * matrix.batch + tl.cast(start, tl.int64) * matrix.position
    offsets = head[:, None] * matrix.row + head[None, :]
    pointers = origin + rows[:, None, None] * matrix.position + offsets[None, :, :]
    existing = (start + rows < length)[:, None, None] & inside[None, :, :]
    tl.store(pointers, gradient.to(matrix.data.dtype.element_ty), mask=existing)


@triton.jit
def _key_tile(dk, dv, keys, values, score_matrix, score_backward, forward, backward, q, grad, lse, sums, prob_mixing, batch, heads, start, first, factor, mask, dropout, shape, SCORE_KIND: tl.constexpr, KIND: tl.constexpr, OF: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Add what the queries of a tile ``[heads, keys, queries]``, or ``[keys, queries]``, add to dk and dv."""
    queries = _rows(q, batch, heads, first, mask.queries, shape, shape.HEADS, shape.DIM, shape.BLOCK_M, shape.BLOCK_D, MASKED)  # fmt: skip
    grads = _rows(grad, batch, heads, first, mask.queries, shape, shape.HEADS, shape.VALUE_DIM, shape.BLOCK_M, shape.BLOCK_DV, MASKED)  # fmt: skip
    t, s = first + tl.arange(0, shape.BLOCK_M), start + tl.arange(0, shape.BLOCK_N)
    lse_i = tl.expand_dims(_load_numbers(lse, batch, heads, first, mask.queries, shape, shape.BLOCK_M, MASKED), -2)
    if KIND == POSITIONWISE:
        forward = _matrix(prob_mixing, batch, first, mask.queries, shape, True)
        backward = _matrix(prob_mixing, batch, first, mask.queries, shape, False)
    scores = _mixed_scores(score_matrix, _dot(keys, _transposed(queries)) * factor, shape, SCORE_KIND)
    scores = _biased(scores, mask, batch, heads, first, start, shape, True)
    if MASKED and mask.CAUSAL:
        visible = _by_position(t[None, :], s[:, None], mask)
        if shape.BLOCK_H > 1:
            visible = visible[None, :, :]
        scores = tl.where(visible, scores, float("-inf"))
    weights, slope = _powers(scores, _level(lse_i, shape), shape)
    if OF != OF_KEYS:
        mixed = _mixed(forward, weights.to(shape.DTYPE), shape, KIND, True)
        mixed = _dropped(mixed, dropout, batch, heads, first, start, shape, shape.BLOCK_M, shape.BLOCK_N, True)
        dv += _dot(mixed.to(shape.DTYPE), grads)
    if OF != OF_VALUES:
        sums_i = tl.expand_dims(
            _load_numbers(sums, batch, heads, first, mask.queries, shape, shape.BLOCK_M, MASKED), -2
        )
        grad_mixed = _dot(values, _transposed(grads))
        grad_mixed = _dropped(grad_mixed, dropout, batch, heads, first, start, shape, shape.BLOCK_M, shape.BLOCK_N, True)  # fmt: skip
        product = weights * (_mixed(backward, grad_mixed, shape, KIND, True) - sums_i) * slope
        product = _mixed(score_backward, product, shape, SCORE_KIND, True)
        dk += _dot(product.to(shape.DTYPE), queries)
    return dk, dv


@triton.jit
def key_pass(q, k, v, factor, scale, score_mixing, prob_mixing, mask, dropout, lse, grad, sums, grad_k, grad_v, shape, OF: tl.constexpr):  # fmt: skip
    """Compute dk, dv or both (``OF``) of a block of keys, a head each where heads share them.

    A key that padding hides gets 0 at the end: no other key reads its numbers.
    """
    start, batch, heads = _place(shape, tl.cdiv(mask.keys, shape.BLOCK_N))
    start = start * shape.BLOCK_N
    keys = _rows(k, batch, heads, start, mask.keys, shape, shape.KEY_GROUPS, shape.DIM, shape.BLOCK_N, shape.BLOCK_D, True)  # fmt: skip
    values = 0.0
    if OF != OF_VALUES:
        values = _rows(v, batch, heads, start, mask.keys, shape, shape.VALUE_GROUPS, shape.VALUE_DIM, shape.BLOCK_N, shape.BLOCK_DV, True)  # fmt: skip
    score_matrix = _matrix(score_mixing, batch, 0, mask.queries, shape, True)
    score_backward = _matrix(score_mixing, batch, 0, mask.queries, shape, False)
    forward = _matrix(prob_mixing, batch, 0, mask.queries, shape, True)
    backward = _matrix(prob_mixing, batch, 0, mask.queries, shape, False)
    if shape.BLOCK_H == 1:
        dk = tl.zeros((shape.BLOCK_N, shape.BLOCK_D), tl.float32)
        dv = tl.zeros((shape.BLOCK_N, shape.BLOCK_DV), tl.float32)
    else:
        dk = tl.zeros((shape.BLOCK_H, shape.BLOCK_N, shape.BLOCK_D), tl.float32)
        dv = tl.zeros((shape.BLOCK_H, shape.BLOCK_N, shape.BLOCK_DV), tl.float32)
    length = _length(mask, batch)
    edges = _query_edges(start, length, mask, shape.BLOCK_M, shape.BLOCK_N)
    for part in tl.static_range(3):
        if part > 0 or mask.CAUSAL:
            for first in tl.range(edges[part], edges[part + 1], shape.BLOCK_M, num_stages=shape.STAGES):
                dk, dv = _key_tile(dk, dv, keys, values, score_matrix, score_backward, forward, backward, q, grad, lse, sums, prob_mixing, batch, heads, start, first, factor, mask, dropout, shape, score_mixing.KIND, prob_mixing.KIND, OF, part != 1)  # fmt: skip
    s = start + tl.arange(0, shape.BLOCK_N)
    visible = s < length
    if mask.padding is not None:
        visible = visible & (tl.load(mask.padding + batch * mask.keys + s, mask=s < mask.keys, other=1) == 0)
    visible = visible[:, None]
    if shape.BLOCK_H > 1:
        visible = visible[None, :, :]
    if OF != OF_VALUES:
        dk = tl.where(visible, dk * scale, 0.0)
        _store(grad_k, dk, batch, heads, start, mask.keys, shape, shape.DIM, shape.BLOCK_N, shape.BLOCK_D)
    if OF != OF_KEYS:
        dv = tl.where(visible, dv, 0.0)
        _store(grad_v, dv, batch, heads, start, mask.keys, shape, shape.VALUE_DIM, shape.BLOCK_N, shape.BLOCK_DV)
