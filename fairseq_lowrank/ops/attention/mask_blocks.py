"""Masks in blocks of scores: which keys a block of queries reads, and which of their scores are hidden."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_lowrank.ops.attention.blocks import Block, slice_block
from fairseq_lowrank.ops.attention.mask import AttentionMask
from fairseq_lowrank.ops.attention.tree import hides_values

# In place of −∞ in masked scores: exp gives exactly 0 next to any real score, and a row without any stays finite.
# Several parts of a mask may hide the same key: their sum stays finite too.
HIDDEN = torch.finfo(torch.float32).min / 8


class MaskBlocks:
    """What a mask hides in blocks of scores ``[B, H, T, S]`` = ``shape``. Float masks are added elsewhere.

    Hidden scores get :data:`HIDDEN` added: on the CPU that is 20 times as fast as filling under a bool mask.

    Args:
        mask: of the call.
        shape: of its scores.
        rows: the most queries of a block. A block never holds queries of two repeats.
        dtype, device: of scores.
    """

    def __init__(
        self,
        mask: AttentionMask,
        shape: tuple[int, int, int, int],
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.mask, self.heads, self.dtype, self.device = mask, shape[1], dtype, device
        self.positions, self.first = mask.visible_prefix(*shape[2:])
        self.own_keys = shape[3] - mask.num_appended_keys
        self._spans = _document_spans(mask.documents)
        self._tensors = [] if mask.key_padding is None else [mask.key_padding[:, None, None, :].to(self.dtype)]
        if mask.additive is not None and mask.bias is None:
            self._tensors.append(mask.additive)
        self._triangle = torch.ones(rows, rows, dtype=dtype, device=device).triu()
        self._formulas = mask.replace(causal=False, window=None) if mask.counts_queries else None

    def keys(self, batch: slice, rows: slice) -> slice:
        """Return the keys that these queries read, from the first to the last that one of them sees."""
        mask, start, stop = self.mask, 0, self.own_keys
        if mask.num_appended_keys:
            return slice(0, stop + mask.num_appended_keys)
        own = self._own(rows)
        if mask.causal:
            stop = min(max(own.stop, 0), stop)
            start = 0 if mask.window is None else max(own.start + 1 - mask.window, 0)
        if self._spans is not None:
            first, last = (span[batch if len(span) > 1 else slice(None), own] for span in self._spans)
            start, stop = max(start, int(first.min())), min(stop, int(last.max()) + 1)
        if mask.rule is not None:
            first_key, end = mask.rule.key_range(own.start, own.stop - 1, self.own_keys)
            start, stop = max(start, first_key), min(stop, end)
        return slice(min(start, max(stop, 0)), max(stop, 0))

    def hide(self, scores: Tensor, block: Block) -> None:
        """Hide keys in the scores ``[b, H, rows, keys]`` of a block."""
        for hidden in self._tensors:
            scores.add_(slice_block(hidden, block).to(self.dtype), alpha=HIDDEN)
        if self._formulas is not None:
            self._by_formulas(scores, block, self._formulas)
        if self.mask.causal:
            self._by_position(scores, block)

    def _own(self, rows: slice) -> slice:
        """Return the positions of these queries among the keys; they may lie before key 0."""
        start = rows.start % self.positions + self.first
        return slice(start, start + rows.stop - rows.start)

    def _by_position(self, scores: Tensor, block: Block) -> None:
        """Hide the keys after the position of each query, and those before its window."""
        # the first key that the block's first query may not see
        first = self._own(block.rows).start + 1 - block.keys.start
        rows, end = scores.size(2), block.num_keys - self.mask.num_appended_keys
        if first < end:
            hidden = self._triangle[:rows, max(-first, 0) : end - first]
            scores[..., max(first, 0) : max(first, 0) + hidden.size(1)].add_(hidden, alpha=HIDDEN)
            if self.mask.num_appended_keys:
                scores[..., max(first + len(self._triangle), 0) : end].add_(HIDDEN)
        window = self.mask.window
        if window is not None and (first := first - window) + rows > 0:
            # now the first key that the first query sees; the next query does not see it
            scores[..., : max(min(first, end), 0)].add_(HIDDEN)
            hidden = (1 - self._triangle)[:rows, max(-first, 0) : max(end - first, 0)]
            scores[..., max(first, 0) : max(first, 0) + hidden.size(1)].add_(hidden, alpha=HIDDEN)

    def _by_formulas(self, scores: Tensor, block: Block, formulas: AttentionMask) -> None:
        """Hide the keys of other documents than that of each query, and those that a rule hides."""
        own, end = self._own(block.rows), min(block.keys.stop, self.own_keys)
        bounds = (block.batch.start, block.batch.stop), (0, self.heads), (own.start, own.stop), (block.keys.start, end)
        indices = (torch.arange(*bound, device=self.device) for bound in bounds)
        hidden = formulas.hidden_by_positions(*indices)
        scores[..., : end - block.keys.start].add_(hidden.to(self.dtype), alpha=HIDDEN)


def _document_spans(documents: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return the first and the last key of the document of each key, ``[B or 1, S]``, or ``None`` where values cannot be read.

    A GPU would be waited for, so its blocks read all keys that causality shows.
    """
    if documents is None or documents.device.type != "cpu" or hides_values(documents) or not documents.numel():
        return None
    known, index = documents.unique(return_inverse=True)
    index = index + torch.arange(len(documents), device=documents.device)[:, None] * len(known)
    positions = torch.arange(documents.size(1), device=documents.device).expand_as(index)
    empty = positions.new_zeros(len(documents) * len(known))
    ends = (
        empty.scatter_reduce(0, index.flatten(), positions.flatten(), how, include_self=False)
        for how in ("amin", "amax")
    )
    first, last = (end[index] for end in ends)
    return first, last
