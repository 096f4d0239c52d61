"""Decoding step by step: cached keys and values of earlier steps, and beams."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts.projection import KeyValueStates

MIN_CACHE_CAPACITY = 8
SMALL_CACHE = 1 << 13
"""Up to this number of elements, copying a tensor costs less than the calls that write into a buffer."""


class CacheBuffer:
    """Tensors ``[B, G, capacity, D]`` whose first ``length`` positions are in use. A step appends after them.

    A state can append in place only if it holds every used position. An older copy of a state gets its own buffer, so that
    no state overwrites what another one reads.
    """

    def __init__(self, tensors: Sequence[Tensor], length: int) -> None:
        self.tensors = list(tensors)
        self.length = length

    def can_append(self, saved: Sequence[Tensor], new: int = 0) -> bool:
        """Return True if ``saved`` are the positions in use, with room for ``new`` after them."""
        first, buffer = saved[0], self.tensors[0]
        if first.size(2) != self.length or self.length + new > buffer.size(2) or first.data_ptr() != buffer.data_ptr():
            return False
        return not buffer.is_inference() or torch.is_inference_mode_enabled()

    def select(self, order: Tensor) -> CacheBuffer:
        """Return a buffer with the batch entries ``order`` and the same capacity."""
        return CacheBuffer([tensor.index_select(0, order) for tensor in self.tensors], self.length)

    def append(self, new: Sequence[Tensor]) -> None:
        start, count = self.length, new[0].size(2)
        for buffer, tensor in zip(self.tensors, new, strict=True):
            buffer.narrow(2, start, count).copy_(tensor)
        self.length = start + count

    def views(self) -> list[Tensor]:
        return [tensor.narrow(2, 0, self.length) for tensor in self.tensors]


class LayerCache(NamedTuple):
    """Cached tensors of the earlier steps of one layer.

    Args:
        tensors: ``[B, G, S, D]`` each, by name, before anything is folded into them.
        padding: ``[B, S]``, true at padding; ``None`` if there is none.
        buffer: the memory that the tensors are views of.
    """

    tensors: KeyValueStates
    padding: Tensor | None = None
    buffer: CacheBuffer | None = None

    @property
    def length(self) -> int:
        return next(iter(self.tensors.values())).size(2)

    @property
    def batch(self) -> int:
        return next(iter(self.tensors.values())).size(0)

    def extended(self, new: KeyValueStates, padding: Tensor | None) -> LayerCache:
        """Return a cache with further positions: in place if the buffer has room.

        A small cache has no buffer. While gradients are recorded, nothing is written in place either.
        """
        tensors, buffer = self.tensors, self.buffer
        first = next(iter(tensors.values()))
        if padding is not None or self.padding is not None:
            padding = _join_padding(self.padding, padding, first, next(iter(new.values())).size(2))
        if (buffer is None and first.numel() <= SMALL_CACHE) or torch.is_grad_enabled():
            return LayerCache({name: torch.cat((old, new[name]), dim=2) for name, old in tensors.items()}, padding)
        old, further = list(tensors.values()), list(new.values())
        count = further[0].size(2)
        if buffer is None or not buffer.can_append(old, count):
            length = first.size(2)
            # A quarter more each time: a sequence is copied a few times, and little of the buffer stays empty.
            capacity = length + count + max(MIN_CACHE_CAPACITY, (length + count) // 4)
            memories = [tensor.new_empty(*tensor.shape[:2], capacity, tensor.size(3)) for tensor in old]
            for memory, tensor in zip(memories, old, strict=True):
                memory.narrow(2, 0, length).copy_(tensor)
            buffer = CacheBuffer(memories, length)
        buffer.append(further)
        return LayerCache(dict(zip(new, buffer.views(), strict=True)), padding, buffer)

    def reordered(self, order: Tensor) -> LayerCache:
        """Return a cache with the batch entries ``order``."""
        # A GPU is not asked: the answer would take longer than the copy.
        if order.device.type == "cpu" and torch.equal(order, torch.arange(self.batch, device=order.device)):
            return self
        padding = None if self.padding is None else self.padding.index_select(0, order)
        if self.buffer is not None and self.buffer.can_append(list(self.tensors.values())):
            buffer = self.buffer.select(order)
            return LayerCache(dict(zip(self.tensors, buffer.views(), strict=True)), padding, buffer)
        tensors = {name: tensor.index_select(0, order) for name, tensor in self.tensors.items()}
        return LayerCache(tensors, padding)


class DecodingCache:
    """Keeps keys and values of earlier steps, for all layers of a model. Pass one object to every step of a text.

    ::

        cache = DecodingCache()
        for step in steps:  # [1, B, embed_dim] each
            output, _ = layer(step, step, step, incremental_state=cache)

    It is no dictionary, because FSDP with a ``MixedPrecisionPolicy`` and ``accelerate`` copy dictionaries among the arguments, and what
    is written into a copy is lost. fairseq's dictionaries work wherever nothing copies them.
    """

    def __init__(self) -> None:
        self._entries: dict[str, LayerCache] = {}

    def get(self, key: str) -> LayerCache | None:
        return self._entries.get(key)

    def __setitem__(self, key: str, cache: LayerCache) -> None:
        self._entries[key] = cache

    def clear(self) -> None:
        """Forget everything: the next step is the first of another text."""
        self._entries.clear()

    def copy(self) -> DecodingCache:
        """Return a cache with the same positions. Steps of one do not change the other, and memory is shared until then."""
        copied = DecodingCache()
        copied._entries = dict(self._entries)
        return copied

    def reorder(self, new_order: Tensor) -> None:
        """Let entry i of the batch become the old entry ``new_order[i]``, in all layers, as a beam search or a smaller batch needs it.

        A decoder whose layers share keys between hypotheses (``beam_size``) calls ``reorder_incremental_state`` of each layer instead.
        """
        self._entries = {key: cache.reordered(new_order) for key, cache in self._entries.items()}

    @property
    def length(self) -> int:
        """The number of cached positions; the largest one if layers differ, as cross attention does."""
        return max((cache.length for cache in self._entries.values()), default=0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.length} positions of {len(self._entries)} layers)"


IncrementalState = dict[str, LayerCache] | DecodingCache
"""A cache for a whole model, with an entry for each layer."""


class IncrementalCache:
    """Reads and writes the entry of one layer in an incremental state.

    A copy of a layer that has an entry finds it in a copy of the state. A copy of a layer that has none is another layer of the
    same model, as :class:`torch.nn.TransformerEncoder` makes them, and gets a separate entry. A pickled layer is such a copy too.

    Attributes:
        refuses_lost_entries: a step that finds no entry after a step whose entry is lost is an error. fairseq's searches start a
            dictionary for each batch and may end after one step, so its layers set False.
    """

    refuses_lost_entries = True

    def __init__(self) -> None:
        self.key, self.used = _new_key(), False
        self._begun: weakref.ref[Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_begun": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if not self.used:
            self.key = _new_key()

    def get(self, state: IncrementalState | None) -> LayerCache | None:
        """Return the entry of the layer, or ``None`` if it has none.

        Raises:
            ValueError: the state is no dictionary.
        """
        if state is None:
            return None
        if not isinstance(state, (dict, DecodingCache, MutableMapping)):  # the abstract class alone is asked slowly
            raise ValueError(
                f"incremental_state is a {type(state).__name__}: expected a dictionary or a DecodingCache. Pass an empty one at the first "
                "step, and the same one at each later one."
            )
        return state.get(self.key)

    def length(self, state: IncrementalState | None) -> int:
        """Return the number of cached positions of the layer."""
        cache = self.get(state)
        return 0 if cache is None else cache.length

    def set(self, state: IncrementalState, cache: LayerCache) -> None:
        if not torch.compiler.is_compiling():
            begins = self.refuses_lost_entries and not isinstance(state, DecodingCache) and state.get(self.key) is None
            self._begun = weakref.ref(next(iter(cache.tensors.values()))) if begins else None
        state[self.key] = cache
        self.used = True

    def extended(self, state: IncrementalState, new: KeyValueStates, padding: Tensor | None) -> LayerCache:
        """Return the cached tensors with those of a step after them. The state keeps them when they are :meth:`set`.

        Raises:
            UserError: a step of one position begins with an empty dictionary, and so did the step before, whose entry is lost.
        """
        old = self.get(state)
        if old is None and self._begun is not None and next(iter(new.values())).size(2) == 1 and self._begun() is None:
            self._begun = None
            if not isinstance(state, DecodingCache):
                raise UserError(
                    "incremental_state: a dictionary is empty again after a step that wrote into it. A wrapper copies it, such as "
                    "FSDP with a MixedPrecisionPolicy or accelerate. Pass a DecodingCache() to all steps of a text."
                )
        return LayerCache(new, padding) if old is None else old.extended(new, padding)

    def reorder(self, state: IncrementalState, order: Tensor, *, encoder_keys: bool, beam_size: int) -> None:
        """Let entry i of the batch become the old entry ``order[i]``.

        Args:
            encoder_keys: the cache belongs to sentences and not to hypotheses. As in fairseq it stays as long as no sentence
                leaves the batch.
            beam_size: hypotheses in a row that share an entry of encoder keys.
        """
        cache = self.get(state)
        if cache is None:
            return
        if encoder_keys:
            if cache.batch * beam_size == order.size(0):
                return
            order = order[::beam_size] // beam_size
        self.set(state, cache.reordered(order))


def _new_key() -> str:
    return f"{uuid.uuid4()}.attn_state"


def _join_padding(saved: Tensor | None, new: Tensor | None, old_keys: Tensor, new_keys: int) -> Tensor:
    """Return the padding of saved and new keys; a part without one has no padding. ``new`` may already cover every key."""
    batch, saved_keys = old_keys.size(0), old_keys.size(2)
    if new is not None and new.size(1) == saved_keys + new_keys:
        return new
    real = old_keys.new_zeros((), dtype=torch.bool)
    saved = real.expand(batch, saved_keys) if saved is None else saved.bool()
    new = real.expand(batch, new_keys) if new is None else new.bool()
    return torch.cat((saved, new), dim=1)


def infer_beam_size(batch: int, key_batch: int, allowed: int) -> int:
    """Return how many hypotheses in a row share the keys of a batch entry.

    Raises:
        ValueError: neither 1 nor ``allowed``.
    """
    beam = 1 if batch == key_batch else batch // max(key_batch, 1)
    if beam * key_batch != batch or beam not in (1, allowed):
        expected = f"{key_batch}" if allowed == 1 else f"{key_batch}, or {key_batch * allowed} with beam_size={allowed}"
        raise ValueError(f"batch sizes do not match: query has {batch}, key has {key_batch}. Expected {expected}.")
    return beam


def join_beams(q: Tensor, beam: int) -> Tensor:
    """Let the hypotheses of a sentence become further queries: ``[B*beam, H, T, D]`` to ``[B, H, beam*T, D]``."""
    return q if beam == 1 else q.unflatten(0, (-1, beam)).transpose(1, 2).flatten(2, 3)


def split_beams(tensor: Tensor, beam: int) -> Tensor:
    """Undo :func:`join_beams`: ``[B, H, beam*T, N]`` to ``[B*beam, H, T, N]``."""
    return tensor if beam == 1 else tensor.unflatten(2, (beam, -1)).transpose(1, 2).flatten(0, 1)
