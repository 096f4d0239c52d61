"""The attention of exported models: transformers' own module for plain attention, a layer of this package for any other."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache
from transformers.models.m2m_100.modeling_m2m_100 import M2M100Attention

from fairseq_lowrank.attention import CAUSAL, AttentionConfig, AttentionSpec, MultiheadAttention, PackedDocuments
from fairseq_lowrank.attention.decoding import IncrementalCache, LayerCache
from fairseq_lowrank.huggingface.exported.configuration import LowrankConfig
from fairseq_lowrank.messages import UserError


class CacheOfLayer(NamedTuple):
    """What a layer gets as its incremental state: a cache of transformers, and the padding ``[B, S]`` of all keys."""

    cache: Cache
    layer: int
    padding: Tensor | None


class PackedStates(IncrementalCache):
    """Keeps the states of a layer in a cache of transformers.

    Such a cache has a tensor of keys and one of values ``[B, G, S, D]``. Methods cache one to four tensors with different
    numbers of heads. So all of them are the features of one head of keys, and the values are empty.

    Args:
        sizes: heads and features of each tensor, by name.
    """

    def __init__(self, sizes: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        self.sizes = sizes

    def get(self, state: Any) -> LayerCache | None:
        if state is None or state.cache.get_seq_length(state.layer) == 0:
            return None
        return self._unpacked(state.cache.layers[state.layer].keys, state.padding)

    def length(self, state: Any) -> int:
        # a quantised cache keeps only the newest keys as they are
        return 0 if state is None else state.cache.get_seq_length(state.layer)

    def extended(self, state: Any, new: dict[str, Tensor], padding: Tensor | None) -> LayerCache:
        packed = torch.cat([new[name].transpose(1, 2).flatten(2) for name in self.sizes], dim=-1).unsqueeze(1)
        keys, _ = state.cache.update(packed, packed[..., :0], state.layer)
        return self._unpacked(keys, state.padding)

    def set(self, state: Any, cache: LayerCache) -> None:
        """Do nothing: a cache of transformers has the states already."""

    def _unpacked(self, packed: Tensor, padding: Tensor | None) -> LayerCache:
        parts = packed[:, 0].split([heads * size for heads, size in self.sizes.values()], dim=-1)
        tensors = {
            name: part.unflatten(-1, shape).transpose(1, 2)
            for (name, shape), part in zip(self.sizes.items(), parts, strict=True)
        }
        return LayerCache(tensors, padding)


class LowrankAttention(MultiheadAttention):
    """A layer of this package, called like an attention module of transformers.

    Args:
        config: the sizes and choices of the layer, with ``batch_first``.
        dropout: probability of dropping an attention weight.
        layer_idx: index of the layer in a cache.
    """

    def __init__(self, config: AttentionConfig, *, dropout: float, is_causal: bool, layer_idx: int) -> None:
        super().__init__(config, dropout=dropout)
        self.is_causal, self.layer_idx = is_causal, layer_idx
        self.cache = PackedStates(self.cached_sizes)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from ``hidden_states`` ``[B, T, d]`` to themselves and the cache, or to ``key_value_states`` ``[B, S, kdim]``.

        Args:
            attention_mask: ``[B, S]``, 0 at padding among all keys, cached ones too.
            position_ids: ``[B, T]``, which begin again with each packed text; read without mask and cache, as in transformers.

        Returns:
            ``[B, T, d]``, and the weights ``[B, H, T, S]`` with ``output_attentions``, else None.

        Raises:
            UserError: a cache of fixed size, whose empty slots this layer would attend to.
        """
        cross = key_value_states is not None
        keys = key_value_states if cross else hidden_states
        padding = None if attention_mask is None else attention_mask == 0
        state = None
        if past_key_values is not None:
            if past_key_values.is_compileable:
                raise UserError(
                    f"{type(past_key_values).__name__}: attention of this package needs a cache that grows. "
                    "Leave out cache_implementation."
                )
            cache = past_key_values
            if isinstance(past_key_values, EncoderDecoderCache):
                cache = past_key_values.cross_attention_cache if cross else past_key_values.self_attention_cache
                if cross:
                    keys = None if past_key_values.is_updated.get(self.layer_idx) else keys
                    past_key_values.is_updated[self.layer_idx] = True
            state = CacheOfLayer(cache, self.layer_idx, padding)
        mask = CAUSAL if self.is_causal else None
        if self.is_causal and position_ids is not None and attention_mask is None and past_key_values is None:
            begins = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1
            if torch.compiler.is_compiling() or bool(begins.any()):
                mask = PackedDocuments(ids=begins.cumsum(1))
        return super().forward(
            hidden_states,
            keys,
            keys,
            padding,
            state,  # type: ignore[arg-type]
            need_weights=bool(output_attentions),
            average_attn_weights=False,
            attn_mask=mask,
        )


ATTENTION = (M2M100Attention, LowrankAttention)


def build_attention(config: LowrankConfig, site: str, layer_idx: int) -> M2M100Attention | LowrankAttention:
    """Return the attention of a site (``encoder``, ``decoder`` or ``cross``) of an exported model."""
    stack = "encoder" if site == "encoder" else "decoder"
    size, heads = getattr(config, f"{stack}_embed_dim"), getattr(config, f"{stack}_attention_heads")
    keys = config.encoder_embed_dim if site == "cross" else size
    choices = getattr(config, f"{site}_attention") or {}
    if not choices and keys == size and size % heads == 0:
        return M2M100Attention(
            size,
            heads,
            dropout=config.attention_dropout,
            is_decoder=site != "encoder",
            bias=config.attention_bias,
            is_causal=site == "decoder",
            config=config,  # type: ignore[arg-type]
            layer_idx=layer_idx,
        )
    options = AttentionConfig(
        AttentionSpec(**choices),
        size,
        heads,
        kdim=keys,
        vdim=keys,
        bias=config.attention_bias,
        self_attention=site != "cross",
        encoder_decoder_attention=site == "cross",
        batch_first=True,
        depth=layer_idx + 1,
        max_positions=config.max_source_positions if site == "encoder" else config.max_target_positions,
    )
    return LowrankAttention(options, dropout=config.attention_dropout, is_causal=site == "decoder", layer_idx=layer_idx)
