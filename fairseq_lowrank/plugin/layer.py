"""The attention layer with the interface that fairseq calls."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fairseq_lowrank.attention.decoding import IncrementalState, LayerCache
from fairseq_lowrank.attention.layer import MultiheadAttention
from fairseq_lowrank.attention.states import split_in_proj
from fairseq_lowrank.ops import AttentionMask

_PADDING = "prev_key_padding_mask"


class FairseqAttention(MultiheadAttention):
    """A :class:`~fairseq_lowrank.attention.MultiheadAttention` with the interface of fairseq's module of that name."""

    site: str
    """Where the model has the layer: ``encoder``, ``decoder`` or ``cross``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache.refuses_lost_entries = False

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | AttentionMask | str | None = None,
        **options: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention as the parent class does, with fairseq's order of arguments.

        Args:
            static_kv: keys and values do not change between steps: use the cached ones if there are any.

        A search repeats the encoder's keys for each hypothesis. If the beam size is known, they are used once for each sentence.
        (Without a state there is no search: a model keeps its beam size when it trains again after BLEU in validation.)
        """
        if static_kv and self.cache.get(incremental_state) is not None:
            key = value = None
        elif (
            incremental_state is not None
            and self.beam_size > 1
            and self.encoder_decoder_attention
            and (key is not None and value is not None)
            and key.size(1) == query.size(1)
        ):
            key, value = key[:, :: self.beam_size], value[:, :: self.beam_size]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[:: self.beam_size]
        # fairseq's own layer takes masks of integers, 1 where a key is hidden.
        if key_padding_mask is not None and not key_padding_mask.is_floating_point():
            key_padding_mask = key_padding_mask.to(torch.bool)
        if isinstance(attn_mask, Tensor) and attn_mask.dtype == torch.uint8:
            attn_mask = attn_mask.to(torch.bool)
        return super().forward(
            query,
            key,
            value,
            key_padding_mask,
            incremental_state,
            need_weights=need_weights,
            attn_mask=attn_mask,
            **options,
        )

    def set_beam_size(self, beam_size: int) -> None:
        """Set the number of successive hypotheses of each sentence, so that encoder keys are cached once a sentence."""
        self.beam_size = beam_size

    @property
    def _names(self) -> dict[str, str]:
        """The names that fairseq's layers, its ONNX export and cross-self-attention use for cached tensors.

        ``--cross-self-attention`` looks for ``prev_key`` to find out if a state has keys.
        """
        return {self.projection.value_state: "prev_value", self.projection.key_state: "prev_key"}

    def _get_input_buffer(self, incremental_state: IncrementalState | None) -> dict[str, Tensor | None]:
        cache = self.cache.get(incremental_state)
        if cache is None:
            return {}
        names = self._names
        return {names.get(name, name): tensor for name, tensor in cache.tensors.items()} | {_PADDING: cache.padding}

    def _set_input_buffer(
        self, incremental_state: IncrementalState, buffer: dict[str, Tensor | None]
    ) -> IncrementalState:
        names = self._names
        # only the padding may be None
        tensors = {name: cast(Tensor, buffer[names.get(name, name)]) for name in self.cached_sizes}
        padding = buffer.get(_PADDING)  # fairseq's own layer keeps 0 and 1 as floats
        self.cache.set(incremental_state, LayerCache(tensors, None if padding is None else padding.bool()))
        return incremental_state

    # fairseq calls this before torch looks for the projections.
    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Split the joint projections of old fairseq checkpoints."""
        split_in_proj(state_dict, f"{name}." if name else "")
