"""Keys and values of earlier decoding steps, in memory with room for later ones: a step writes behind them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LEAST_ROOM = 8


class DecodingCache:
    """Tensors ``[B, G, capacity, D]`` of which the first ``length`` positions are in use.

    Only behind all positions in use is there room: whoever holds fewer of them, such as a copy of a state that has gone
    on since, gets memory of its own (:func:`extended`), so that no state writes over what another one reads.
    """

    def __init__(self, tensors: Sequence[Tensor], length: int) -> None:
        self.tensors = list(tensors)
        self.length = length

    def continues(self, saved: Sequence[Tensor], new: int = 0) -> bool:
        """Whether ``saved`` are the positions in use, with room for ``new`` behind them."""
        first, memory = saved[0], self.tensors[0]
        same = first.data_ptr() == memory.data_ptr() and first.size(0) == memory.size(0) and first.dtype == memory.dtype
        writable = torch.is_inference_mode_enabled() or not memory.is_inference()
        return same and writable and first.size(2) == self.length and self.length + new <= memory.size(2)

    def select(self, order: Tensor) -> DecodingCache:
        """The batch entries ``order``, room and all."""
        return DecodingCache([tensor.index_select(0, order) for tensor in self.tensors], self.length)

    def append(self, new: Sequence[Tensor]) -> None:
        total = self.length + new[0].size(2)
        for memory, tensor in zip(self.tensors, new, strict=True):
            memory[:, :, self.length : total] = tensor
        self.length = total

    def views(self) -> list[Tensor]:
        return [tensor[:, :, : self.length] for tensor in self.tensors]


def extended(
    cache: DecodingCache | None, saved: Sequence[Tensor], new: Sequence[Tensor]
) -> tuple[DecodingCache | None, list[Tensor]]:
    """``saved`` and ``new`` ``[B, G, ., D]`` joined along positions: in place where ``cache`` has room behind ``saved``.

    Where gradients are recorded nothing is written in place and no cache is made.
    """
    if torch.is_grad_enabled():
        return None, [torch.cat(pair, dim=2) for pair in zip(saved, new, strict=True)]
    length = saved[0].size(2)
    total = length + new[0].size(2)
    if cache is None or not cache.continues(saved, total - length):
        # A quarter more each time: a sequence is copied a few times in all, and little of the room stays empty.
        capacity = total + max(_LEAST_ROOM, total // 4)
        memory = [tensor.new_empty(*tensor.shape[:2], capacity, tensor.size(3)) for tensor in saved]
        for room, tensor in zip(memory, saved, strict=True):
            room[:, :, :length] = tensor
        cache = DecodingCache(memory, length)
    cache.append(new)
    return cache, cache.views()
