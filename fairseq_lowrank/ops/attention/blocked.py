"""Attention in linear memory for all that a fused kernel cannot do: head mixing, sigsoftmax, dropout on the CPU.

A block of queries at a time over the keys it may see. Head mixing needs the probabilities of all heads for the same
queries and keys at once, but never those of all queries::

            keys →
          ┌────────────────┐   for each block of rows:
    q  0  │▓▒              │     P  = activation(scale · q kᵀ + terms, masked)     [H, rows, keys it may see]
    u  1  │▓▓▓▒            │     P̄  = mixed P, then dropout
    e  2  │▓▓▓▓▓▒          │     output rows = P̄ v
    r  3  │▓▓▓▓▓▓▓▒        │   ▓ computed  ▒ the diagonal, computed and masked  (rest) never touched
    ↓     └────────────────┘

The backward pass is written by hand. It keeps nothing of size T×S: each block computes its P again from q and k, then

    dv += P̄ᵀ do,   dP̄ = do vᵀ,   dM = P dP̄ᵀ,   dP = M dP̄,   ds = P ∘ (dP − Σ_s P ∘ dP),   dq = ds k,   dk += dsᵀ q

and draws the same dropout again from the block's own seed. PyTorch's softmax is one fused pass over a row that sits in
the cache, cheaper than exp(s − lse), so the row statistics are computed again too instead of being saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_lowrank.ops.activation import at_least_float32, without_autocast
from fairseq_lowrank.ops.attention.contract import AttentionInputs, hiding_value, is_traced
from fairseq_lowrank.ops.first_order import first_order, refuse_transforms

# Queries of a block: more make better matrix products, but a causal block computes rows² / 2 scores a head for nothing.
_LEAST_ROWS, _MOST_ROWS = 64, 128
# Scores of a block of several batch entries at most: 2 MiB in float32, so that its few buffers stay in a CPU's cache.
_SCORES = 1 << 19

# Keys of a tile in which the gradients of keys and values are summed.
_TILE = 256

# In place of −∞ in masked scores: exp gives exactly 0 beside any real score, and a row without any stays finite.
# Several parts of a mask may hide the same key: their sum stays finite too.
_HIDDEN = torch.finfo(torch.float32).min / 8
# Two finite biases at this floor are still far from hidden.
_LEAST_BIAS = _HIDDEN / 8

FIRST_ORDER = (
    "the blocked backend of attention has first derivatives in reverse mode alone: for second derivatives, forward mode and "
    'torch.func choose backend="reference"'
)

Buffer = Callable[..., Tensor]


def refusal(inputs: AttentionInputs) -> str | None:
    """What of ``inputs`` this backend cannot compute, in words, or ``None``."""
    return "the attention weights (need_weights)" if inputs.need_weights else None


def compute(inputs: AttentionInputs) -> tuple[Tensor, None]:
    heads = _heads(inputs)
    return heads if inputs.head_scale is None else heads * inputs.head_scale.to(heads.dtype), None


def _heads(inputs: AttentionInputs) -> Tensor:
    traced, device = is_traced(inputs.q), inputs.q.device.type
    if not traced:
        refuse_transforms(FIRST_ORDER)
    q, k, v = inputs.q, inputs.k, inputs.v
    if not q.is_meta and torch.is_autocast_enabled(device):
        q, k, v = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (q, k, v))
    # From the CPU's generator whatever the device: nothing waits for a GPU, and checkpointed layers restore it.
    seed = torch.randint(2**62, (), device="cpu") if inputs.dropout_p else None
    mask, additive = inputs.mask, inputs.mask.additive
    hidden = additive if mask.bias is None else None
    tensors = BlockTensors(q, k, v, _matrices(inputs), inputs.score_bias, mask.bias, mask.key_padding, hidden)
    settings = (mask.causal, inputs.activation, inputs.scale, inputs.dropout_p)
    if traced:
        return torch.ops.fairseq_lowrank.blocked_attention(*tensors, seed, *settings)
    return _Attention.apply(BlockCall(*settings, 0 if seed is None else int(seed)), *tensors)


def _matrices(inputs: AttentionInputs) -> Tensor | None:
    """``[H, H]``, or ``[B, T, H, H]`` for position-wise mixing (H numbers a head where q has D), or ``None``.

    Made outside the blocks: autograd goes on from their gradient to W^M, B and the mixing query.
    """
    if inputs.mixing is None or inputs.mixing.is_diagonal:
        return None
    weight, query_weight = inputs.mixing
    with without_autocast(inputs.q):
        if query_weight is None:
            return at_least_float32(weight)
        # In [T, B, H, D], the order in which a layer projects queries, the product copies nothing.
        query = at_least_float32(inputs.mixing_query).permute(2, 0, 1, 3)
        return (query @ at_least_float32(query_weight) + at_least_float32(weight)).transpose(0, 1)


class BlockCall(NamedTuple):
    """What is no tensor."""

    causal: bool
    activation: str
    scale: float
    dropout_p: float
    seed: int


class BlockTensors(NamedTuple):
    """All tensors of a call. The first six are differentiated; the last two are bool, true where keys are hidden."""

    q: Tensor
    k: Tensor
    v: Tensor
    matrices: Tensor | None
    score_bias: Tensor | None
    mask_bias: Tensor | None
    padding: Tensor | None
    hidden: Tensor | None


class _Block(NamedTuple):
    """Queries ``rows`` of the batch entries ``batch`` over the first ``keys`` keys; ``index`` counts blocks."""

    index: int
    batch: slice
    rows: slice
    keys: int


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: BlockCall, *tensors: Tensor | None) -> Tensor:
        ctx.call = call
        # The masks too: autograd then notices that one was changed in place before the backward pass reads it.
        ctx.save_for_backward(*tensors)
        return attend(call, BlockTensors(*tensors))

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_transforms(FIRST_ORDER, grad_output)
        tensors = BlockTensors(*ctx.saved_tensors)
        with torch.no_grad():
            gradients = input_gradients(ctx.call, tensors, grad_output, ctx.needs_input_grad[5:7])
        return None, *first_order(gradients, (*tensors, grad_output), FIRST_ORDER), None, None

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(FIRST_ORDER)


def attend(call: BlockCall, tensors: BlockTensors) -> Tensor:
    """The heads ``[B, H, T, Dv]``."""
    q, v = tensors.q, tensors.v
    with without_autocast(q):
        problem = _Problem(call, tensors)
        output = empty_heads(v, q.size(2), q.size(1), v.size(3))
        for block in problem.blocks():
            if block.keys == 0:
                output[block.batch, :, block.rows] = 0
                continue
            weights, _ = problem.probabilities(block)
            weights = problem.mixing.mix(weights, block, problem.buffer)
            keep = problem.keep(block, weights.shape)
            if keep is not None:
                weights = weights.mul_(keep)
            heads = problem.product(problem.folded(weights), problem.values(block))
            heads = heads.view(*weights.shape[:3], -1)
            output[block.batch, :, block.rows] = heads.mul_(problem.dropout_scale)
        return output


def input_gradients(
    call: BlockCall, tensors: BlockTensors, grad_output: Tensor, bias_needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, matrices (where there are any) and of those of the two biases that need one."""
    with without_autocast(tensors.q):
        problem = _Problem(call, tensors)
        gradients = _Gradients(problem, bias_needed)
        for block in problem.blocks():
            if block.keys:
                gradients.add(block, grad_output[block.batch, :, block.rows])
            else:
                gradients.q[block.batch, :, block.rows] = 0
        return gradients.of_inputs()


class _Problem:
    """The inputs of a call, cut into blocks; everything here is of linear size but for the buffers of one block."""

    def __init__(self, call: BlockCall, tensors: BlockTensors) -> None:
        q, k, v, matrices, score_bias, mask_bias, padding, additive = tensors
        self.call, self.q, self.k, self.v = call, q, k, v
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.batch, self.heads, self.queries, _ = q.shape
        self.groups, self.num_keys = k.shape[1:3]
        self.offset = self.num_keys - self.queries if call.causal else None
        # Of the two only a mask hides where it is finite.
        self.biases = [
            None if score_bias is None else _Bias(score_bias, hides_from=float("-inf")),
            None if mask_bias is None else _Bias(mask_bias, hides_from=hiding_value(mask_bias.dtype)),
        ]
        if matrices is None:
            self.mixing = _Unmixed()
        else:
            self.mixing = (_StaticMixing if matrices.dim() == 2 else _PositionwiseMixing)(matrices)
        self.rows = min(max(self.queries, 1), max(_LEAST_ROWS, min(_MOST_ROWS, self.num_keys // 128 * 16)))
        scores = self.heads * self.rows * self.num_keys
        self.entries = min(max(self.batch, 1), max(1, self.mixing.most_scores // max(scores, 1)))
        self._elements = (self.entries * scores + 3) // 4 * 4
        self._buffers: dict[str, Tensor] = {}
        # Hidden keys are 1 and times _HIDDEN added to scores: on the CPU 20 times as fast as filling under a bool mask.
        self._hidden = [] if padding is None else [padding[:, None, None, :].to(self.dtype)]
        if additive is not None:
            self._hidden.append(additive)
        self._triangle = torch.ones(self.rows, self.rows, dtype=self.dtype, device=q.device).triu()
        # Dropout compares numbers of 16 bits: p is rounded to a multiple of 2⁻¹⁶ below 1.
        self._threshold = min(round(call.dropout_p * 2**16), 2**16 - 1)
        self.dropout_scale = 1 / (1 - self._threshold / 2**16)

    def blocks(self) -> Iterator[_Block]:
        index = 0
        for first in range(0, self.batch, self.entries):
            for row in range(0, self.queries, self.rows):
                end = min(row + self.rows, self.queries)
                keys = self.num_keys if self.offset is None else min(max(end + self.offset, 0), self.num_keys)
                yield _Block(index, slice(first, min(first + self.entries, self.batch)), slice(row, end), keys)
                index += 1

    def buffer(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory that every block reuses under this name."""
        size = 1
        for length in shape:
            size *= length
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self._elements, dtype=dtype or self.dtype, device=self.q.device)
        return self._buffers[name][:size].view(shape)

    def release_buffers(self) -> None:
        self._buffers.clear()

    # Heads that share a key become further queries of it: [B, H, T, D] beside [B, G, S, D] is taken as
    # [B·G, (H/G)·T, D] beside [B·G, S, D], so that keys and values are never expanded.

    def folded(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(tensor.size(0) * self.groups, -1, tensor.size(3))

    def queries_of(self, block: _Block) -> Tensor:
        return self.folded(self.q[block.batch, :, block.rows])

    def keys(self, block: _Block) -> Tensor:
        return self.k[block.batch, :, : block.keys].flatten(0, 1)

    def values(self, block: _Block) -> Tensor:
        return self.v[block.batch, :, : block.keys].flatten(0, 1)

    def product(self, left: Tensor, right: Tensor, out: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """scale · left @ right in the dtype of q, into float32 or better."""
        if self.q.dtype == torch.float16 and scale != 1:
            # Unscaled products may pass the largest float16.
            left, right = (left * scale, right) if left.numel() < right.numel() else (left, right * scale)
            scale = 1.0
        if self.q.dtype != self.dtype:
            result = torch.bmm(left.to(self.q.dtype), right.to(self.q.dtype)).to(self.dtype).mul_(scale)
            return result if out is None else out.copy_(result)
        if out is None:
            out = left.new_empty(left.size(0), left.size(1), right.size(2))
        return torch.baddbmm(out, left, right, beta=0, alpha=scale, out=out)

    def probabilities(self, block: _Block) -> tuple[Tensor, Tensor | None]:
        """P ``[B, H, rows, keys]``, and σ of its scores where the activation needs it."""
        entries, rows, keys = _length(block.batch), _length(block.rows), block.keys
        scores = self.buffer("scores", entries, self.heads, rows, keys)
        self.product(self.queries_of(block), self.keys(block).transpose(1, 2), self.folded(scores), self.call.scale)
        for bias in self.biases:
            if bias is not None:
                bias.add_to(scores, block)
        for hidden in self._hidden:
            scores.add_(_cut(hidden, block).to(self.dtype), alpha=_HIDDEN)
        if self.offset is not None:
            first = block.rows.start + self.offset + 1  # the first key that the block's first query may not see
            if first < keys:
                hidden = self._triangle[:rows, max(-first, 0) : keys - first]
                scores[..., max(first, 0) :].add_(hidden, alpha=_HIDDEN)
        visible = None
        if self._hidden or any(self.biases) or (self.offset or 0) < 0:
            visible = (scores.amax(dim=-1, keepdim=True) > _HIDDEN / 2).to(self.dtype)
        if self.call.activation == "softmax":
            weights, sigmoid = torch.softmax(scores, -1, out=scores), None
        else:
            weights, sigmoid = self._sigsoftmax(scores)
        return weights if visible is None else weights.mul_(visible), sigmoid

    def _sigsoftmax(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """exp(s) σ(s) normalised, in place, and σ(s).

        Rows that lie below −40 are shifted up to it within σ: there σ(s) = exp(s) to the last bit, so only a factor
        of the row changes, and it cannot vanish.
        """
        shift = (-40 - scores.amax(dim=-1, keepdim=True)).clamp_(min=0)
        sigmoid = torch.add(scores, shift, out=self.buffer("sigmoid", *scores.shape)).sigmoid_()
        weights = torch.softmax(scores, -1, out=scores).mul_(sigmoid)
        return weights.div_(weights.sum(dim=-1, keepdim=True)), sigmoid

    def keep(self, block: _Block, shape: torch.Size) -> Tensor | None:
        """1 where dropout keeps a weight, else 0: the same for the same block of the same call."""
        if not self._threshold:
            return None
        generator = torch.Generator(self.q.device).manual_seed(self.call.seed + block.index)
        # Four numbers of 16 bits from each of 64. They stay integers: a bool factor is slow on the CPU.
        numbers = self.buffer("noise", (shape.numel() + 3) // 4 * 4, dtype=torch.int16)
        numbers.view(torch.int64).random_(-(2**63), None, generator=generator)
        return numbers[: shape.numel()].view(shape).ge_(self._threshold - 2**15)


class _Gradients:
    """Sums the gradients of all inputs over blocks."""

    def __init__(self, problem: _Problem, bias_needed: Sequence[bool]) -> None:
        self.problem = problem
        q, k, v = problem.q, problem.k, problem.v
        self.q = empty_heads(q, q.size(2), q.size(1), q.size(3))
        # Transposed, since qᵀ ds is a faster product than dsᵀ q, and in tiles of keys, [tiles, B·G, D, _TILE]: several
        # threads share a product into contiguous memory better.
        self.tile = min(_TILE, problem.num_keys)
        tiles = -(-problem.num_keys // self.tile) if self.tile else 0
        self.k, self.v = (
            torch.zeros(tiles, t.size(0) * t.size(1), t.size(3), self.tile, dtype=problem.dtype, device=t.device)
            for t in (k, v)
        )
        pairs = zip(problem.biases, bias_needed, strict=True)
        self.biases = [bias for bias, needed in pairs if bias is not None and needed]
        for bias in self.biases:
            bias.start_gradient(problem.dtype)

    def add(self, block: _Block, grad_output: Tensor) -> None:
        problem = self.problem
        weights, sigmoid = problem.probabilities(block)
        q, grad_output = problem.queries_of(block), problem.folded(grad_output * problem.dropout_scale)
        keep = problem.keep(block, weights.shape)
        used = problem.mixing.mix(weights, block, problem.buffer)
        if keep is not None:
            used = torch.mul(used, keep, out=used if used is not weights else problem.buffer("mixed", *used.shape))
        self._accumulate(self.v, block, grad_output, problem.folded(used))
        grad = problem.buffer("mixed", *weights.shape)
        problem.product(grad_output, problem.values(block).transpose(1, 2), problem.folded(grad))
        if keep is not None:
            grad.mul_(keep)
        grad = problem.mixing.score_gradient(weights, grad, block, problem.buffer)
        if sigmoid is not None:
            # ds/dz of z = s + log σ(s) is 2 − σ(s).
            grad.mul_(torch.sub(2, sigmoid, out=sigmoid))
        for bias in self.biases:
            bias.add_gradient(grad, block)
        grad = problem.folded(grad)
        self._accumulate(self.k, block, q, grad, problem.call.scale)
        heads = problem.product(grad, problem.keys(block), scale=problem.call.scale)
        self.q[block.batch, :, block.rows] = heads.view(*weights.shape[:3], -1)

    def _accumulate(self, total: Tensor, block: _Block, rows: Tensor, weights: Tensor, scale: float = 1.0) -> None:
        """total += scale · rowsᵀ weights over the block's keys."""
        groups, problem = self.problem.groups, self.problem
        entries, rows = slice(block.batch.start * groups, block.batch.stop * groups), rows.transpose(1, 2)
        for tile, start in zip(total, range(0, block.keys, self.tile), strict=False):
            part_of_weights = weights[:, :, start : start + self.tile]
            part = tile[entries, :, : part_of_weights.size(2)]
            if rows.dtype == weights.dtype == total.dtype:
                part.baddbmm_(rows, part_of_weights, alpha=scale)
            else:
                part.add_(problem.product(rows, part_of_weights, scale=scale))

    def of_inputs(self) -> tuple[Tensor | None, ...]:
        problem = self.problem
        problem.release_buffers()  # before the copies, so that both never stand side by side
        k, v = (self._of_keys(total).to(t.dtype) for total, t in ((self.k, problem.k), (self.v, problem.v)))
        biases = [bias.gradient.to(bias.bias.dtype) if bias in self.biases else None for bias in problem.biases]
        return self.q, k, v, problem.mixing.gradient, *biases

    def _of_keys(self, total: Tensor) -> Tensor:
        """The tiles as ``[B, G, S, D]``, laid out as ``[S, B, G, D]`` like the keys of a layer."""
        tiles = total.unflatten(1, (self.problem.batch, self.problem.groups)).permute(0, 4, 1, 2, 3)
        return tiles.flatten(0, 1)[: self.problem.num_keys].permute(1, 2, 0, 3)


class _Bias:
    """A term of the scores, given as a tensor broadcastable to ``[B, H, T, S]`` and cut into blocks unexpanded.

    It hides keys where it is ``hides_from`` or less.
    """

    def __init__(self, bias: Tensor, hides_from: float) -> None:
        self.bias, self.hides_from = bias, hides_from
        self.gradient: Tensor | None = None

    def add_to(self, scores: Tensor, block: _Block) -> None:
        part = _cut(self.bias, block)
        scores.add_(torch.where(part <= self.hides_from, _HIDDEN, part.to(scores.dtype).clamp(min=_LEAST_BIAS)))

    def start_gradient(self, dtype: torch.dtype) -> None:
        self.gradient = torch.zeros_like(self.bias, dtype=dtype)

    def add_gradient(self, grad_scores: Tensor, block: _Block) -> None:
        part = _cut(self.gradient, block)
        part += grad_scores.sum_to_size(part.shape)


# How heads are mixed. ``mix`` gives P̄ of P, ``score_gradient`` the gradient of the scores (before what sigsoftmax adds) of
# P and dP̄, both ``[B, H, rows, keys]``; ``most_scores`` bounds a block of several batch entries.


class _Unmixed:
    most_scores = _SCORES
    gradient = None

    def mix(self, weights: Tensor, block: _Block, buffer: Buffer) -> Tensor:
        return weights

    def score_gradient(self, weights: Tensor, grad: Tensor, block: _Block, buffer: Buffer) -> Tensor:
        return _softmax_gradient(weights, grad)


class _StaticMixing:
    """P̄_i = Σ_j M[j, i] P_j with one M ``[H, H]``: a product of H×H with H×(rows·keys)."""

    most_scores = _SCORES

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.gradient = torch.zeros_like(matrix) if matrix.requires_grad else None

    def mix(self, weights: Tensor, block: _Block, buffer: Buffer) -> Tensor:
        return self._multiply(self.matrix.t(), weights, buffer("mixed", *weights.shape))

    def score_gradient(self, weights: Tensor, grad: Tensor, block: _Block, buffer: Buffer) -> Tensor:
        if self.gradient is not None:
            self.gradient += torch.bmm(weights.flatten(2), grad.flatten(2).transpose(1, 2)).sum(dim=0)
        return _softmax_gradient(weights, self._multiply(self.matrix, grad, buffer("unmixed", *grad.shape)))

    def _multiply(self, matrix: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        torch.bmm(matrix.expand(weights.size(0), -1, -1), weights.flatten(2), out=out.flatten(2))
        return out


class _PositionwiseMixing:
    """P̄_i[t] = Σ_j M_t[j, i] P_j[t] with M ``[B, T, H, H]``: for each query a product of H×H with H×keys."""

    # The queries of several batch entries are copied into one order: that pays only for the smallest of blocks.
    most_scores = 1 << 16

    def __init__(self, matrices: Tensor) -> None:
        self.matrices = matrices
        self.gradient = torch.zeros_like(matrices)  # zero where a whole block sees no key

    def mix(self, weights: Tensor, block: _Block, buffer: Buffer) -> Tensor:
        return self._multiply(self._of(block).transpose(1, 2), weights, buffer("mixed", *_by_query(weights).shape))

    def score_gradient(self, weights: Tensor, grad: Tensor, block: _Block, buffer: Buffer) -> Tensor:
        matrices, by_query = self._of(block), _by_query(weights)
        matrices_gradient = torch.bmm(_rows(by_query), _rows(_by_query(grad)).transpose(1, 2))
        self.gradient[block.batch, block.rows] = matrices_gradient.view(*by_query.shape[:2], *matrices.shape[1:])
        grad = self._multiply(matrices, grad, buffer("unmixed", *by_query.shape))
        # Σ_s P_j dP_j = Σ_i M[j, i] Σ_s P_j dP̄_i, and the inner sum is the gradient of M.
        row_sums = (matrices * matrices_gradient).sum(dim=-1).view(*by_query.shape[:3], 1).transpose(1, 2)
        return torch.mul(grad.sub_(row_sums), weights, out=weights)

    def _of(self, block: _Block) -> Tensor:
        return self.matrices[block.batch, block.rows].flatten(0, 1)

    def _multiply(self, matrices: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        torch.bmm(matrices, _rows(_by_query(weights)), out=out.flatten(0, 1))
        return out.transpose(1, 2)


def _by_query(weights: Tensor) -> Tensor:
    return weights.transpose(1, 2)


def _rows(by_query: Tensor) -> Tensor:
    """``[B, rows, H, keys]`` as ``[B·rows, H, keys]``: a view where B is 1, so that nothing is copied."""
    return by_query.reshape(-1, *by_query.shape[2:])


def _softmax_gradient(weights: Tensor, grad: Tensor) -> Tensor:
    """P ∘ (dP − Σ_s P ∘ dP), in place of ``grad``."""
    return torch.ops.aten._softmax_backward_data.out(grad, weights, -1, weights.dtype, grad_input=grad)


def _cut(tensor: Tensor, block: _Block) -> Tensor:
    """The part of a tensor broadcastable to ``[B, H, T, S]`` that a block sees, still unexpanded."""
    tensor = tensor[(None,) * (4 - tensor.dim())]
    parts = (block.batch, slice(None), block.rows, slice(block.keys))
    return tensor[tuple(part if size > 1 else slice(None) for part, size in zip(parts, tensor.shape, strict=True))]


def _length(part: slice) -> int:
    return part.stop - part.start


def empty_heads(like: Tensor, queries: int, heads: int, dim: int) -> Tensor:
    """``[B, H, T, D]`` laid out as ``[T, B, H, D]``, the order in which a layer's output projection reads it."""
    return like.new_empty(queries, like.size(0), heads, dim).permute(1, 2, 0, 3)
