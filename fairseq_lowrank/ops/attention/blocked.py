"""Attention in linear memory for all that a fused kernel cannot do: head mixing, sigsoftmax, dropout on the CPU.

A block of queries at a time over the keys it may see. Head mixing needs the probabilities of all heads for the same
queries and keys at once, but never those of all queries::

            keys →
          ┌────────────────┐   for each block of rows:
    q  0  │▓▒              │     P  = activation(scores, mixed, masked)            [H, rows, keys it may see]
    u  1  │▓▓▓▒            │     P̄  = mixed P, then dropout
    e  2  │▓▓▓▓▓▒          │     output rows = P̄ v
    r  3  │▓▓▓▓▓▓▓▒        │   ▓ computed  ▒ the diagonal, computed and masked  (rest) never touched
    ↓     └────────────────┘

With a sliding window, the keys before the window of a block's first query are never touched either.

The backward pass is written by hand. It keeps nothing of size T×S: each block computes its scores S and P again, then

    dv += P̄ᵀ do,   dP̄ = do vᵀ,   dM = P dP̄ᵀ,   dP = M dP̄,   dS' = P ∘ (dP − Σ_s P ∘ dP),   dL = S dS'ᵀ,   dS = L dS'

and what dS makes of queries and keys, and draws the same dropout again from the block's own seed. What scores, mixing and
activation there are is theirs to compute: :mod:`.scores`, :mod:`.mixing`, :mod:`fairseq_lowrank.ops.activation`.
PyTorch's softmax is one fused pass over a row that sits in the cache, cheaper than exp(s − lse), so the row statistics
are computed again too instead of being saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from fairseq_lowrank.ops.activation import ACTIVATIONS, without_autocast
from fairseq_lowrank.ops.attention import recomputing
from fairseq_lowrank.ops.attention.blocks import Block, KeyGradient, Workspace, group_queries, slice_block
from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.distances import collect, spread
from fairseq_lowrank.ops.attention.mask import hiding_value
from fairseq_lowrank.ops.attention.mask_blocks import HIDDEN, MaskBlocks
from fairseq_lowrank.ops.attention.recomputing import RecomputeBackend
from fairseq_lowrank.ops.attention.tree import empty_heads, flatten, is_traced

# Queries of a block: more make better matrix products, but a causal block computes rows² / 2 scores a head for nothing. So it has the
# fewest up to MANY_KEYS, where that still counts.
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS, MANY_KEYS = 64, 128, 2048
# Scores of a block of several batch entries at most. On a CPU 2 MiB in float32, so that its few buffers stay in its cache; a GPU
# waits for each launch, so that it takes many entries at once, in 128 MiB.
MAX_BLOCK_ELEMENTS, MAX_BLOCK_ELEMENTS_GPU = 1 << 19, 1 << 25
# Fewer than these, 16 MiB, a GPU reads and writes faster than it is told to: then a block has more queries.
MIN_BLOCK_ELEMENTS_GPU = 1 << 22

# Two finite biases at this floor are still far from hidden.
_LEAST_BIAS = HIDDEN / 8


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return what this backend cannot compute of ``call``, in words, or ``None``."""
    if (reason := call.for_reference_alone) is not None:
        return reason
    rule = call.mask.rule
    if rule is not None and rule.is_function and is_traced(call.v):
        return "a mask that is a function while it is traced"
    return "the attention weights (need_weights)" if call.need_weights else None


def device_unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why this backend does not run on a device in a dtype: always ``None``, for it runs everywhere."""
    return None


def compute(call: AttentionCall) -> tuple[Tensor, None]:
    return recomputing.compute(call, BACKEND), None


def attend(call: AttentionCall, seed: int) -> tuple[Tensor, tuple[()]]:
    """Compute the heads ``[B, H, T, Dv]``; nothing is kept for the backward pass."""
    _, heads, queries, _ = call.scores.shape
    with without_autocast(call.v):
        problem = BlockedAttention(call, seed)
        output = empty_heads(call.v, queries, heads, call.v.size(3))
        for block in problem.blocks():
            if block.num_keys == 0:
                output[block.batch, :, block.rows] = 0
                continue
            weights, _ = problem.probabilities(block)
            weights = problem.mixed(weights, block)
            keep = problem.dropout_mask(block, weights.shape)
            if keep is not None:
                weights = weights.mul_(keep)
            scale = problem.dropout_scale
            part = problem.work.product(
                group_queries(weights, problem.groups), problem.work.keys(call.v, block), scale=scale
            )
            output[block.batch, :, block.rows] = part.reshape(*weights.shape[:3], -1)
        return output, ()


def input_gradients(
    call: AttentionCall, seed: int, grad_output: Tensor, kept: Sequence[Tensor] = ()
) -> list[Tensor | None]:
    """Compute the gradients of the tensors of ``call``, in its order; ``None`` for biases and mixing that need none."""
    with without_autocast(call.v):
        problem = BlockedAttention(call, seed)
        values = KeyGradient(call.v, problem.work)
        for block in problem.blocks():
            if block.num_keys:
                problem.differentiate(block, grad_output[block.batch, :, block.rows], values)
        problem.work.release()  # before the copies, so that both never stand side by side
        mask = call.mask
        mask_tensors = flatten(mask)[1]
        return [
            *problem.scores.gradients(),
            values.result(),
            *(problem.biases["mask"].gradient if tensor is mask.bias else None for tensor in mask_tensors),
            *([] if call.score_bias is None else [problem.biases["score"].gradient]),
            *(
                gradient
                for mixing in (problem.score_mixing, problem.prob_mixing)
                if mixing
                for gradient in mixing.gradients()
            ),
            *([] if call.sinks is None else [problem.sink_gradient()]),
            *([] if call.distance_bias is None else [problem.biases["distance"].gradient]),
        ]


BACKEND = RecomputeBackend("blocked", attend, input_gradients)


class BlockedAttention:
    """A call, cut into blocks; everything here is of linear size but for the buffers of one block."""

    def __init__(self, call: AttentionCall, seed: int) -> None:
        self.call, self.seed, self.mask = call, seed, call.mask
        self.batch, self.heads, self.queries, self.num_keys = call.scores.shape
        self.groups = call.v.size(1)
        # Number of queries after which positions start again; all queries if nothing reads positions.
        self.positions, _ = call.mask.visible_prefix(self.queries, self.num_keys)
        if not call.mask.causal and call.distance_bias is None and not call.mask.counts_queries:
            self.positions = self.queries
        self.rows = min(max(self.positions, 1), _rows(call))
        widest = self.num_keys
        if self.mask.window is not None and not self.mask.num_appended_keys:
            widest = min(widest, self.rows + self.mask.window - 1)
        scores = self.heads * self.rows * widest
        self.entries = min(max(self.batch, 1), max(1, _max_block_elements(call, call.v.device.type) // max(scores, 1)))
        self.work = Workspace(call.v, (self.entries * scores + 3) // 4 * 4)
        self.dtype, device = self.work.dtype, call.v.device
        self.hiding = MaskBlocks(call.mask, call.scores.shape, self.rows, self.dtype, device)
        self.scores = call.scores.blocks(self.work)
        self.score_mixing = None if call.score_mixing is None else call.score_mixing.blocks()
        self.prob_mixing = None if call.prob_mixing is None else call.prob_mixing.blocks()
        self.activation = ACTIVATIONS[call.activation]
        # A mask hides at finite values too, a bias only at −inf.
        self.biases: dict[str, _Bias | _DistanceBias] = {}
        if call.score_bias is not None:
            self.biases["score"] = _Bias(call.score_bias, self.dtype, hides_from=float("-inf"))
        if call.mask.bias is not None:
            self.biases["mask"] = _Bias(call.mask.bias, self.dtype, hides_from=hiding_value(call.mask.bias.dtype))
        if call.distance_bias is not None:
            self.biases["distance"] = _DistanceBias(call.distance_bias, self.dtype, self.positions)
        self._sinks: Tensor | None = None
        if call.sinks is not None:
            self._sinks = self.activation.logits(call.sinks.detach().to(self.dtype)).view(1, -1, 1, 1)
            self._grad_sinks = torch.zeros_like(self._sinks)
        # Dropout compares numbers of 16 bits: p is rounded to a multiple of 2⁻¹⁶ below 1.
        self._threshold = min(round(call.dropout_p * 2**16), 2**16 - 1)
        self.dropout_scale = 1 / (1 - self._threshold / 2**16)
        self._generator = torch.Generator(device) if self._threshold else None

    def blocks(self) -> Iterator[Block]:
        index = 0
        starts = [
            row
            for start in range(0, self.queries, self.positions or 1)
            for row in range(start, start + self.positions, self.rows)
        ]
        for first in range(0, self.batch, self.entries):
            for row in starts:
                end = min(row + self.rows, row - row % self.positions + self.positions)
                batch, rows = slice(first, min(first + self.entries, self.batch)), slice(row, end)
                yield Block(index, batch, rows, self.hiding.keys(batch, rows))
                index += 1

    def probabilities(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """Compute P ``[b, H, rows, keys]``, and return it with what the activation keeps for its backward pass."""
        shape = _length(block.batch), self.heads, _length(block.rows), block.num_keys
        scores = self.work.buffer("scores" if self.score_mixing is None else "unmixed scores", *shape)
        self.scores.forward(block, scores)
        if self.score_mixing is not None:
            scores = self.score_mixing.mix(scores, block, partial(self.work.buffer, "scores"))
        for bias in self.biases.values():
            bias.add_to(scores, block)
        self.hiding.hide(scores, block)
        visible = None
        if self.biases or self.mask.may_hide_rows(self.queries, self.num_keys):
            visible = (scores.amax(dim=-1, keepdim=True) > HIDDEN / 2).to(self.dtype)
        share = None
        if self._sinks is not None:
            total = self.activation.logits(scores).logsumexp(dim=-1, keepdim=True)
            share = total.sub_(self._sinks).sigmoid_()
        weights, kept = self.activation.forward(scores, self.work.buffer)
        for factor in (visible, share):
            weights = weights if factor is None else weights.mul_(factor)
        return weights, kept

    def mixed(self, weights: Tensor, block: Block) -> Tensor:
        return (
            weights
            if self.prob_mixing is None
            else self.prob_mixing.mix(weights, block, partial(self.work.buffer, "mixed"))
        )

    def dropout_mask(self, block: Block, shape: torch.Size) -> Tensor | None:
        """Return 1 where dropout keeps a weight, else 0: the same for the same block of the same call."""
        if self._generator is None:
            return None
        generator = self._generator.manual_seed(self.seed + block.index)
        # Four numbers of 16 bits from each of 64. They stay integers: a bool factor is slow on the CPU.
        numbers = self.work.buffer("noise", (shape.numel() + 3) // 4 * 4, dtype=torch.int16)
        numbers.view(torch.int64).random_(-(2**63), None, generator=generator)
        return numbers[: shape.numel()].view(shape).ge_(self._threshold - 2**15)

    def differentiate(self, block: Block, grad_output: Tensor, values: KeyGradient) -> None:
        """Add a block's part of all gradients."""
        work, groups = self.work, self.groups
        weights, kept = self.probabilities(block)
        grad_output = group_queries(
            grad_output if self.dropout_scale == 1 else grad_output * self.dropout_scale, groups
        )
        keep = self.dropout_mask(block, weights.shape)
        used = self.mixed(weights, block)
        if keep is not None:
            used = torch.mul(used, keep, out=used if used is not weights else work.buffer("mixed", *used.shape))
        values.add(block, grad_output, group_queries(used, groups))
        grad = work.buffer("mixed", *weights.shape)
        work.product(grad_output, work.keys(self.call.v, block).transpose(1, 2), group_queries(grad, groups))
        if keep is not None:
            grad.mul_(keep)
        sums = None
        if self.prob_mixing is not None:
            grad, sums = self.prob_mixing.backward(weights, grad, block, partial(work.buffer, "unmixed"))
        if self._sinks is not None:
            self._differentiate_sinks(weights, grad, sums)
        grad = self.activation.backward(weights, grad, sums, kept)
        for bias in self.biases.values():
            bias.add_gradient(grad, block)
        if self.score_mixing is not None:
            scores = work.buffer("unmixed scores", *weights.shape)
            grad, _ = self.score_mixing.backward(scores, grad, block, partial(work.buffer, "unmixed scores"))
        self.scores.backward(block, grad)

    def _differentiate_sinks(self, weights: Tensor, grad: Tensor, sums: Tensor | None) -> None:
        """Add −P_sink Σ_s P_s dP_s: the weight of a sink reads no value, so it gets no other gradient."""
        sums = (weights * grad).sum(dim=-1, keepdim=True) if sums is None else sums
        share = 1 - weights.sum(dim=-1, keepdim=True)
        self._grad_sinks -= (share * sums).sum(dim=(0, 2), keepdim=True)

    def sink_gradient(self) -> Tensor | None:
        """Return the gradient of the sinks, through the logits of the activation."""
        sinks = self.call.sinks
        assert sinks is not None
        if not sinks.requires_grad:
            return None
        slope = self.activation.slope(sinks.detach().to(self.dtype))
        return (slope * self._grad_sinks.flatten()).to(sinks.dtype)


class _Bias:
    """A term of the scores, given as a tensor broadcastable to ``[B, H, T, S]`` and cut into blocks unexpanded.

    It hides keys where it is ``hides_from`` or less.
    """

    def __init__(self, bias: Tensor, dtype: torch.dtype, hides_from: float) -> None:
        self.bias, self.dtype, self.hides_from = bias, dtype, hides_from
        self._sum: Tensor | None = None

    def add_to(self, scores: Tensor, block: Block) -> None:
        part = slice_block(self.bias, block)
        scores.add_(torch.where(part <= self.hides_from, HIDDEN, part.to(scores.dtype).clamp(min=_LEAST_BIAS)))

    def add_gradient(self, grad_scores: Tensor, block: Block) -> None:
        if not self.bias.requires_grad:
            return
        if self._sum is None:
            self._sum = torch.zeros_like(self.bias, dtype=self.dtype)
        part = slice_block(self._sum, block)
        part += grad_scores.sum_to_size(part.shape)

    @property
    def gradient(self) -> Tensor | None:
        if not self.bias.requires_grad:
            return None
        return torch.zeros_like(self.bias) if self._sum is None else self._sum.to(self.bias.dtype)


class _DistanceBias:
    """A term of the scores by distance, see :mod:`.distances`; nothing larger than a block is made of it.

    Args:
        bias: ``[1 or B, 1 or H, T + S − 1]``; it hides where it is −inf.
        positions: T.
    """

    def __init__(self, bias: Tensor, dtype: torch.dtype, positions: int) -> None:
        self.bias, self.positions, self.dtype = bias, positions, dtype
        self._finite = torch.where(bias == float("-inf"), HIDDEN, bias.to(dtype).clamp(min=_LEAST_BIAS))
        self._sum: Tensor | None = None

    def add_to(self, scores: Tensor, block: Block) -> None:
        scores.add_(spread(self._part(self._finite, block), _length(block.rows), block.num_keys))

    def add_gradient(self, grad_scores: Tensor, block: Block) -> None:
        if not self.bias.requires_grad:
            return
        if self._sum is None:
            self._sum = torch.zeros_like(self.bias, dtype=self.dtype)
        part = self._part(self._sum, block)
        part += collect(grad_scores.sum_to_size(part.size(0), part.size(1), *grad_scores.shape[2:]))

    def _part(self, tensor: Tensor, block: Block) -> Tensor:
        """Return the part of a tensor like the bias that a block sees; no block reaches beyond one repeat of the queries."""
        start = block.rows.start % self.positions
        stop = start + _length(block.rows)
        batch = block.batch if tensor.size(0) > 1 else slice(None)
        return tensor[batch, :, self.positions - stop + block.keys.start : self.positions - start + block.keys.stop - 1]

    @property
    def gradient(self) -> Tensor | None:
        if not self.bias.requires_grad:
            return None
        return torch.zeros_like(self.bias) if self._sum is None else self._sum.to(self.bias.dtype)


def _rows(call: AttentionCall) -> int:
    """Return the queries of a block, if there are as many."""
    batch, heads, _, keys = call.scores.shape
    few = call.mask.causal and keys <= MANY_KEYS
    rows = MIN_BLOCK_ROWS if few else max(MIN_BLOCK_ROWS, min(MAX_BLOCK_ROWS, keys // 128 * 16))
    if call.v.device.type == "cpu":
        return rows
    return max(rows, MIN_BLOCK_ELEMENTS_GPU // max(batch * heads * keys, 1) // 16 * 16)


def _max_block_elements(call: AttentionCall, device: str) -> int:
    """Return the most scores that a block of several batch entries may hold on this device."""
    if device != "cpu":
        return MAX_BLOCK_ELEMENTS_GPU
    limits = [
        mixing.max_block_elements
        for mixing in (call.score_mixing, call.prob_mixing)
        if mixing and mixing.max_block_elements
    ]
    return min(limits, default=MAX_BLOCK_ELEMENTS)


def _length(part: slice) -> int:
    return part.stop - part.start
