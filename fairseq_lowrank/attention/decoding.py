"""Decoding step by step: what is kept of earlier steps, and beams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairseq_lowrank.attention.projections.projection import Memory
from fairseq_lowrank.attention.scores import Score

_LEAST_ROOM = 8


class DecodingCache:
    """Tensors ``[B, G, capacity, D]`` of which the first ``length`` positions are in use: a step writes behind them.

    Only behind all positions in use is there room: whoever holds fewer of them, such as a copy of a state that has gone
    on since, gets memory of its own, so that no state writes over what another one reads.
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


class Saved(NamedTuple):
    """What a layer keeps of earlier steps.

    Args:
        tensors: ``[B, G, S, D]`` each, by name, before anything is folded into them.
        padding: ``[B, S]``, true at padding; ``None`` where there is none.
        cache: the memory that the tensors are views of.
    """

    tensors: Memory
    padding: Tensor | None = None
    cache: DecodingCache | None = None

    @property
    def batch(self) -> int:
        return next(iter(self.tensors.values())).size(0)

    def extended(self, new: Memory, padding: Tensor | None) -> Saved:
        """With further positions: in place where there is room behind those in use.

        Where gradients are recorded nothing is written in place and no cache is made.
        """
        old, further = list(self.tensors.values()), list(new.values())
        padding = _join_padding(self.padding, padding, old[0], further[0].size(2))
        if torch.is_grad_enabled():
            joined = [torch.cat(pair, dim=2) for pair in zip(old, further, strict=True)]
            return Saved(dict(zip(new, joined, strict=True)), padding)
        length, cache = old[0].size(2), self.cache
        total = length + further[0].size(2)
        if cache is None or not cache.continues(old, total - length):
            # A quarter more each time: a sequence is copied a few times in all, and little of the room stays empty.
            capacity = total + max(_LEAST_ROOM, total // 4)
            memory = [tensor.new_empty(*tensor.shape[:2], capacity, tensor.size(3)) for tensor in old]
            for room, tensor in zip(memory, old, strict=True):
                room[:, :, :length] = tensor
            cache = DecodingCache(memory, length)
        cache.append(further)
        return Saved(dict(zip(new, cache.views(), strict=True)), padding, cache)

    def reordered(self, order: Tensor) -> Saved:
        """With the batch entries ``order``."""
        # Not asked of a GPU, where the answer would take longer than the copy.
        if order.device.type == "cpu" and torch.equal(order, torch.arange(self.batch, device=order.device)):
            return self
        padding = None if self.padding is None else self.padding.index_select(0, order)
        if self.cache is not None and self.cache.continues(list(self.tensors.values())):
            cache = self.cache.select(order)
            return Saved(dict(zip(self.tensors, cache.views(), strict=True)), padding, cache)
        tensors = {name: tensor.index_select(0, order) for name, tensor in self.tensors.items()}
        return Saved(tensors, padding)


IncrementalState = dict[str, Saved]
"""A dictionary for a whole model, with an entry for each layer."""


def _join_padding(saved: Tensor | None, new: Tensor | None, old_keys: Tensor, new_keys: int) -> Tensor | None:
    """Padding of saved and new keys; where one part has none it is all real. ``new`` may already cover every key."""
    batch, saved_keys = old_keys.size(0), old_keys.size(2)
    if new is not None and new.size(1) == saved_keys + new_keys:
        return new
    if saved is None and new is None:
        return None
    real = old_keys.new_zeros((), dtype=torch.bool)
    saved = real.expand(batch, saved_keys) if saved is None else saved.bool()
    new = real.expand(batch, new_keys) if new is None else new.bool()
    return torch.cat((saved, new), dim=1)


class Decoding(nn.Module):
    """What a layer remembers from step to step: a dictionary for a whole model holds an entry for each layer.

    Attributes:
        beam_size: how many hypotheses in a row may share the keys of one batch entry.
    """

    encoder_decoder_attention: bool
    score: Score
    beam_size = 1

    @property
    def _state_key(self) -> str:
        return f"{id(self)}.attn_state"

    def saved(self, incremental_state: IncrementalState | None) -> Saved | None:
        """What this layer keeps of earlier steps."""
        return None if incremental_state is None else incremental_state.get(self._state_key)

    def save(self, incremental_state: IncrementalState, saved: Saved) -> None:
        """Keep this for the next step."""
        incremental_state[self._state_key] = saved

    def remember(
        self, key: Tensor | None, value: Tensor | None, padding: Tensor | None, state: IncrementalState | None
    ) -> tuple[Memory, Tensor | None]:
        """What keys and values are made of, joined with what is saved, and its padding."""
        saved = self.saved(state)
        if key is None or value is None:
            if saved is None or key is not None or value is not None:
                raise ValueError(
                    "key and value may be None only where incremental_state holds saved ones, and only together"
                )
            return saved.tensors, saved.padding
        memory = self.score.project_memory(self, key, value)
        if state is None:
            return memory, padding
        saved = Saved(memory, padding) if saved is None else saved.extended(memory, padding)
        self.save(state, saved)
        return saved.tensors, saved.padding

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> IncrementalState:
        """Follow the beam: entry i of the batch of saved keys and values becomes the old entry ``new_order[i]``.

        Keys of an encoder belong to sentences, not to hypotheses: as in fairseq they stay while no sentence leaves the batch,
        and are picked by sentence where ``beam_size`` says that they are kept once a sentence.
        """
        saved, beam = self.saved(incremental_state), self.beam_size
        if saved is None:
            return incremental_state
        if self.encoder_decoder_attention:
            if saved.batch * beam == new_order.size(0):
                return incremental_state
            new_order = new_order[::beam] // beam
        self.save(incremental_state, saved.reordered(new_order))
        return incremental_state


def beams(batch: int, key_batch: int, allowed: int) -> int:
    """How many hypotheses in a row share the keys of a batch entry.

    Raises:
        ValueError: neither 1 nor ``allowed``.
    """
    beam = 1 if batch == key_batch else batch // max(key_batch, 1)
    if beam * key_batch != batch or beam not in (1, allowed):
        raise ValueError(f"query holds a batch of {batch}, keys one of {key_batch} with beam_size={allowed}")
    return beam


def join_beams(q: Tensor, beam: int) -> Tensor:
    """The hypotheses of a sentence become further queries: ``[B*beam, H, T, D]`` to ``[B, H, beam*T, D]``."""
    return q if beam == 1 else q.unflatten(0, (-1, beam)).transpose(1, 2).flatten(2, 3)


def split_beams(tensor: Tensor, beam: int) -> Tensor:
    """``[B, H, beam*T, N]`` to ``[B*beam, H, T, N]``."""
    return tensor if beam == 1 else tensor.unflatten(2, (beam, -1)).transpose(1, 2).flatten(0, 1)
