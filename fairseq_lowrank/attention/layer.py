"""The attention layer: fairseq's ``MultiheadAttention`` contract over the composition of a spec."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from fairseq_lowrank.attention.cache import DecodingCache, extended
from fairseq_lowrank.attention.masks import CAUSAL, attention_mask, is_right_padding
from fairseq_lowrank.attention.mixing import MIXINGS
from fairseq_lowrank.attention.projection import PROJECTIONS, HeadEmbeddings
from fairseq_lowrank.attention.spec import AttentionSpec
from fairseq_lowrank.ops import AttentionCall, AttentionMask, DotProduct, attention
from fairseq_lowrank.ops.activation import ACTIVATIONS
from fairseq_lowrank.ops.attention import check_backend, reference
from fairseq_lowrank.ops.attention.call import check_rate

_NO_TORCHSCRIPT = "attention of fairseq_lowrank is not available in TorchScript: use torch.export or torch.compile"

IncrementalState = dict[str, dict[str, Tensor | DecodingCache | None]]


class Regulariser(Protocol):
    """What a layer's attribute ``regulariser`` calls while a criterion penalises attention."""

    def __call__(
        self, layer: MultiheadAttention, heads: Tensor, call: AttentionCall, query_padding: Tensor | None
    ) -> Tensor:
        """See the heads of a forward pass and what they were computed from; return the heads to go on with.

        Args:
            layer: where; what of it learns is the regulariser's to ask.
            heads: ``[B, H or 1, T, .]``: one where all heads are alike.
            query_padding: ``[B, T]`` bool, true at queries that are padding; ``None`` also in cross attention, which
                is told nothing of it.
        """


class AttentionDropout(nn.Module):
    """The dropout probability of attention weights; fairseq's ``FairseqDropout`` fits in its place."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.apply_during_inference = False

    def make_generation_fast_(self, name: str = "", retain_dropout: bool = False, **kwargs) -> None:
        """Keep dropping at inference if asked to (fairseq's ``--retain-dropout``)."""
        self.apply_during_inference = retain_dropout

    def extra_repr(self) -> str:
        return f"p={self.p}"


class _NoJointProjection:
    """In the place of a joint weight of queries, keys and values: something that torch's fused paths leave alone."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise TypeError("queries, keys and values have projections of their own: there is no in_proj_weight")


class MultiheadAttention(nn.Module):
    """Multi-head attention composed from a spec, in fairseq's shapes and with fairseq's forward contract.

    ::

        query ─ q_proj ─┐
        key ─── k_proj ─┼─ heads (+ head_embeddings) ─ scores ─ mask ─ activation ─ mixing ─ dropout ─ values ─ out_proj
        value ─ v_proj ─┘

    Args:
        spec: the choice on every axis.
        embed_dim: d, size of queries and of the output.
        num_heads: h.
        kdim: size of keys, by default d.
        vdim: size of values, by default d.
        dropout: probability of dropping an attention weight, or a module with ``p`` and
            ``apply_during_inference`` such as ``FairseqDropout``.
        bias: whether the projections add a bias.
        add_bias_kv: append a learned key and value.
        add_zero_attn: append a key and value of zeros.
        self_attention: query, key and value are the same tensor.
        encoder_decoder_attention: keys and values come from an encoder.
        batch_first: query, key, value and output are ``[batch, time, .]`` instead of ``[time, batch, .]``.
        backend: see :func:`fairseq_lowrank.ops.attention`; where weights are asked for, any that can return them.
        wrap_projection: applied to each projection when it is made, e.g. fairseq's ``quant_noise``.

    Raises:
        ValueError: sizes that do not fit together, or a backend that cannot compute the spec.
    """

    # torch.nn.TransformerEncoder and its layers ask these of their ``self_attn`` before they take a fused path at evaluation,
    # which computes torch.nn.MultiheadAttention whatever stands there. The answers decline it.
    in_proj_weight = _NoJointProjection()
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(
        self,
        spec: AttentionSpec,
        embed_dim: int,
        num_heads: int,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        dropout: float | nn.Module = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        self_attention: bool = False,
        encoder_decoder_attention: bool = False,
        batch_first: bool = False,
        backend: str = "auto",
        wrap_projection: Callable[[nn.Module], nn.Module] = lambda projection: projection,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.head_dim = spec.resolve_head_dim(embed_dim, num_heads, self.kdim, self.vdim)
        self.scaling = self.head_dim**-0.5
        self.self_attention = self_attention
        self.encoder_decoder_attention = encoder_decoder_attention
        self.add_zero_attn = add_zero_attn
        self.batch_first = batch_first
        self.backend = backend
        self.beam_size = 1
        self.regulariser: Regulariser | None = None
        self.projection = PROJECTIONS[spec.projection]
        self.dropout_module = dropout if isinstance(dropout, nn.Module) else AttentionDropout(dropout)
        check_rate("dropout", self.dropout_module.p)

        query_dim = self.head_dim * (1 if self.projection.shared_query else num_heads)
        self.num_key_value_heads = 1 if self.projection.shared_key_value else num_heads
        key_dim = self.head_dim * self.num_key_value_heads
        # Made, and started below, in fairseq's order: the same seed gives the same weights as fairseq's own module.
        linear: Callable[..., nn.Module] = lambda *sizes, **options: wrap_projection(nn.Linear(*sizes, **options))  # noqa: E731
        self.k_proj = None if self.projection.hidden_keys else linear(self.kdim, key_dim, bias=bias)
        self.v_proj = None if self.projection.value_is_key else linear(self.vdim, key_dim, bias=bias)
        self.q_proj = linear(embed_dim, query_dim, bias=bias)
        self.out_proj = linear(num_heads * self.head_dim, embed_dim, bias=bias)
        self.bias_k = nn.Parameter(torch.empty(1, 1, key_dim)) if add_bias_kv else None
        self.bias_v = nn.Parameter(torch.empty(1, 1, key_dim)) if add_bias_kv and self.v_proj is not None else None
        self.reset_parameters()

        combine = self.projection.head_embedding
        self.head_embeddings = HeadEmbeddings(num_heads, self.head_dim, combine) if combine else None
        self.mixing = MIXINGS[spec.mixing](num_heads, self.head_dim)
        head = torch.empty(1, num_heads, 1, self.head_dim)
        mixing = None if self.mixing is None else self.mixing.operation(head)
        call = AttentionCall(DotProduct(head, head), head, mixing=mixing, activation=spec.activation)
        check_backend(backend, call)

    def reset_parameters(self) -> None:
        """Fairseq's starts of the projections (mixing and head embeddings start in their own modules)."""
        gain = 1 / math.sqrt(2) if self.kdim == self.vdim == self.embed_dim else 1.0
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight, gain=gain)
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)
        for appended in (self.bias_k, self.bias_v):
            if appended is not None:
                nn.init.xavier_normal_(appended)

    def extra_repr(self) -> str:
        return f"{self.spec}, num_heads={self.num_heads}, head_dim={self.head_dim}, backend={self.backend}"

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | AttentionMask | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
        *,
        is_causal: bool = False,
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from ``query`` to ``key`` and ``value``.

        Args:
            query: ``[T, B, embed_dim]``; with ``batch_first`` ``[B, T, embed_dim]``, and key, value and output likewise.
            key: ``[S, B, kdim]``; ``None`` where ``static_kv`` finds saved keys.
            value: ``[S, B, vdim]``.
            key_padding_mask: ``[B, S]``, true at padding.
            incremental_state: where keys and values of earlier steps are kept while decoding.
            need_weights: return the weights the layer used (mixed, before dropout), averaged over heads.
            static_kv: keys and values do not change between steps: take the saved ones if there are any.
            attn_mask: ``[T, S]`` float (added) or bool (hidden where true), or :data:`~.masks.CAUSAL`.
            before_softmax: return masked scores ``[B*H, T, S]`` and values ``[B*H, S, head_dim]`` instead.
            need_head_weights: return the weights of each head (implies ``need_weights``).
            is_causal: :data:`~.masks.CAUSAL` where there is no ``attn_mask``. Beside one, which says everything, it changes
                nothing.
            average_attn_weights: if false, weights are those of each head.

        Returns:
            ``[T, B, embed_dim]`` output, and the weights ``[B, T, S]``, with ``need_head_weights`` ``[H, B, T, S]`` (as
            fairseq has them), without ``average_attn_weights`` ``[B, H, T, S]`` (as torch has them), or ``None``.

        Raises:
            ValueError: tensors or masks that do not fit this layer.
        """
        if torch.jit.is_tracing():
            raise NotImplementedError(_NO_TORCHSCRIPT)
        self._check_tensors(query, key, value)
        if self.batch_first:
            query, key, value = _transposed(query, key, value)
        if key is not None and incremental_state is None:
            self._check_layout(query, key, key_padding_mask, attn_mask)
        queries, batch, _ = query.shape
        attn_mask = CAUSAL if is_causal and attn_mask is None else attn_mask
        need_weights = need_weights or need_head_weights
        k, v, key_padding_mask = self._keys_and_values(
            key, value, key_padding_mask, incremental_state, static_kv, batch
        )
        unknown = key_padding_mask is None or self.encoder_decoder_attention
        query_padding = None if unknown else key_padding_mask[:, -queries:].bool()
        mask = attention_mask(attn_mask, key_padding_mask, (k.size(0), self.num_heads, queries, k.size(2)))
        k, v, mask = self._append_keys(k, v, mask)
        q = self._split_heads(self.q_proj(query))
        beam = 1 if batch == k.size(0) else batch // max(k.size(0), 1)
        if beam * k.size(0) != batch or beam not in (1, self.beam_size):
            raise ValueError(f"query holds a batch of {batch}, keys one of {k.size(0)} with beam_size={self.beam_size}")
        if beam > 1:
            # The hypotheses of a sentence share its keys: they become further queries of one batch entry.
            q = q.unflatten(0, (-1, beam)).transpose(1, 2).flatten(2, 3)
            mask = mask.repeated(beam)
        if before_softmax:
            scores, v = self._scores_and_values(q, k, v, mask)
            return _split_beams(scores, beam).flatten(0, 1), v.flatten(0, 1)
        if self.self_attention and mask.causal and mask.key_padding is not None and not need_weights:
            # Queries at real positions see none of the padding to their right.
            mask = replace(mask, key_padding=None) if is_right_padding(mask.key_padding) else mask

        heads, weights = self._attend(q, k, v, mask, need_weights, query_padding)
        heads = _split_beams(heads, beam)
        weights = None if weights is None else _split_beams(weights, beam)
        output = self.out_proj(heads.permute(2, 0, 1, 3).reshape(queries, batch, -1))
        output = output.transpose(0, 1) if self.batch_first else output
        if weights is None:
            return output, None
        if need_head_weights:
            return output, weights.transpose(0, 1)
        return output, weights.mean(dim=1) if average_attn_weights else weights

    def _check_tensors(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
        """Refuse what no layer of these sizes can take."""
        parts = (("query", query, "embed_dim"), ("key", key, "kdim"), ("value", value, "vdim"))
        for name, tensor, size in parts:
            if tensor is None:
                continue
            if tensor.is_nested:
                raise ValueError(f"{name} is a nested tensor: expected a padded one, with key_padding_mask")
            if tensor.dim() != 3:
                layout = "[batch, time, {}]" if self.batch_first else "[time, batch, {}]"
                shape = layout.format(getattr(self, size))
                raise ValueError(f"{name} of shape {list(tensor.shape)}: expected {shape}")
            if tensor.size(2) != getattr(self, size):
                expected = getattr(self, size)
                raise ValueError(f"{name} of size {tensor.size(2)}: this layer was built with {size}={expected}")
            if not tensor.is_floating_point():
                raise ValueError(f"{name} of {tensor.dtype}: expected a float tensor")

    def _check_layout(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | AttentionMask | None
    ) -> None:
        """Refuse tensors of the other layout where masks, or the sizes of the batch, give them away."""
        (queries, batch, _), (keys, key_batch, _) = query.shape, key.shape
        padding = None if key_padding_mask is None else tuple(key_padding_mask.shape)
        mask = tuple(attn_mask.shape[-2:]) if isinstance(attn_mask, Tensor) else None
        fits = padding in (None, (key_batch, keys)) and mask in (None, (queries, keys))
        if fits and (batch == key_batch or self.beam_size > 1):
            return
        # With time and batch exchanged everything has to fit.
        if queries == keys and padding in (None, (keys, key_batch)) and mask in (None, (batch, key_batch)):
            layout = "time first" if self.batch_first else "batch first"
            given = [
                f"{name} {list(shape)}" for name, shape in (("key_padding_mask", padding), ("attn_mask", mask)) if shape
            ]
            raise ValueError(
                f"query {list(query.shape)} and key {list(key.shape)}, read as [time, batch, size], do not fit "
                f"{' and '.join(given) or 'each other'}, but {layout} they do: build the layer with "
                f"batch_first={not self.batch_first}, or transpose them"
            )

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        need_weights: bool,
        query_padding: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Heads ``[B, H, T, D]`` and their weights from ``q [B, H or 1, T, D]`` and unembedded ``k, v [B, G, S, D]``."""
        additive = self.head_embeddings is not None and self.head_embeddings.combine == "add"
        dropping = self.training or self.dropout_module.apply_during_inference
        dropout_p = self.dropout_module.p if dropping else 0.0
        # The additive value embedding enters each output as often as its row of weights sums to.
        sum_rows = additive and bool(dropout_p or self.mixing is not None or self.add_zero_attn)
        if sum_rows:
            v = torch.cat((v, self._embedded_keys(v).expand(v.size(0), -1, -1).unsqueeze(-1)), dim=-1)
        call = replace(self._call(q, k, v, mask), dropout_p=dropout_p, need_weights=need_weights)
        heads, weights = attention(call, "auto" if need_weights else self.backend)
        if self.regulariser is not None:
            heads = self.regulariser(self, heads, call, query_padding)
        if self.head_embeddings is not None:
            row_sums = True
            if sum_rows:
                heads, row_sums = heads[..., :-1], heads[..., -1:]
            elif additive:
                row_sums = mask.rows_with_keys(q.size(2), k.size(2), q.device)
            heads = self.head_embeddings.embed_output(heads, row_sums)
        heads = heads.expand(-1, self.num_heads, -1, -1)
        return heads, None if weights is None else weights.expand(-1, self.num_heads, -1, -1)

    def _call(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, shifts: bool = False) -> AttentionCall:
        """What these heads ask of attention, without dropout; with ``shifts`` the scores are exact, beyond what cancels."""
        score_bias = mixing = None
        # One query for all heads (SHA) attends once, its heads being copies of each other, unless something tells them apart
        # or compares them.
        told_apart = self.mixing is not None or self.head_embeddings is not None or mask.differs_by_head
        if told_apart or self.regulariser is not None:
            q, own_query = self._per_head_queries(q)
            mixing = None if self.mixing is None else self.mixing.operation(own_query)
            # What is added to every score of a row may cancel; not so where the key of zeros lacks it.
            cancels = ACTIVATIONS[self.spec.activation].shift_invariant and not (self.add_zero_attn or shifts)
            if self.head_embeddings is not None and self.head_embeddings.combine == "add" and not cancels:
                score_bias = self._key_embedding_scores(own_query, k)
        scores = DotProduct(q, k, self.scaling)
        return AttentionCall(scores, v, mask, score_bias, mixing=mixing, activation=self.spec.activation)

    def _per_head_queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Queries that meet unembedded keys, and the heads' own queries, which mixing reads: ``[B, H, T, D]``."""
        if self.head_embeddings is None:
            q = q.expand(-1, self.num_heads, -1, -1)
            return q, q
        embedded = self.head_embeddings.embed(q, self.head_embeddings.query)
        return self.head_embeddings.fold_key(embedded), embedded

    def _key_embedding_scores(self, embedded_query: Tensor, k: Tensor) -> Tensor:
        """What additive key embeddings add to the scores, broadcastable to ``[B, H, T, S]``."""
        scores = self.head_embeddings.key_scores(embedded_query) * self.scaling
        return scores * self._embedded_keys(k) if self.add_zero_attn else scores

    def _embedded_keys(self, keys: Tensor) -> Tensor:
        """1 at keys that head embeddings apply to, 0 at the key of zeros: ``[1, S]`` for keys ``[B, G, S, D]``."""
        embedded = keys.new_ones(1, keys.size(2))
        if self.add_zero_attn:
            embedded[:, -1] = 0
        return embedded

    def _scores_and_values(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """Masked scores ``[B, H, T, S]`` and values ``[B, H, S, D]``, embeddings and all."""
        scores = reference.masked_scores(self._call(q, k, v, mask, shifts=True))
        if self.head_embeddings is not None:
            embedded = self.head_embeddings.embed(v, self.head_embeddings.value)
            v = torch.where(self._embedded_keys(v)[..., None].bool(), embedded, v)
        return scores.expand(-1, self.num_heads, -1, -1), v.expand(-1, self.num_heads, -1, -1)

    def _split_heads(self, projected: Tensor) -> Tensor:
        """``[N, B, heads * head_dim]`` to ``[B, heads, N, head_dim]``."""
        return projected.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3)

    def _keys_and_values(
        self,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None,
        incremental_state: IncrementalState | None,
        static_kv: bool,
        batch: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values ``[B, G, S, D]`` before any head embedding, and their padding, joined with the saved ones."""
        saved = self._get_input_buffer(incremental_state)
        if static_kv and "prev_key" in saved:
            tensors = [saved[name] for name in ("prev_key", "prev_value") if name in saved]
            return tensors[0], tensors[-1], saved.get("prev_key_padding_mask")
        if key is None or value is None:
            raise ValueError("key and value may be None only with static_kv and saved keys")
        if self.projection.value_is_key and not _is_same(key, value):
            raise ValueError(f"projection {self.spec.projection!r} uses the keys as values: value must be key itself")
        if self.encoder_decoder_attention and self.beam_size > 1 and key.size(1) == batch:
            key, value = (tensor[:, :: self.beam_size] for tensor in (key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[:: self.beam_size]
        tensors = [self._split_heads(key if self.k_proj is None else self.k_proj(key))]
        if self.v_proj is not None:
            tensors.append(self._split_heads(self.v_proj(value)))
        if incremental_state is not None:
            names = ("prev_key", "prev_value")[: len(tensors)]
            new_keys = tensors[0].size(2)
            cache = None
            if "prev_key" in saved:
                cache, tensors = extended(saved.get("cache"), [saved[name] for name in names], tensors)
            key_padding_mask = _join_padding(saved.get("prev_key_padding_mask"), key_padding_mask, tensors[0], new_keys)
            buffer = dict(zip(names, tensors, strict=True), prev_key_padding_mask=key_padding_mask)
            self._set_input_buffer(incremental_state, buffer if cache is None else {**buffer, "cache": cache})
        return tensors[0], tensors[-1], key_padding_mask

    def _append_keys(self, k: Tensor, v: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor, AttentionMask]:
        """Append the learned key and the key of zeros, which every query sees."""
        batch, _, keys, _ = k.shape
        if self.bias_k is not None:
            bias_v = self.bias_k if self.bias_v is None else self.bias_v
            k = torch.cat((k, self._split_heads(self.bias_k.expand(-1, batch, -1)).to(k.dtype)), dim=2)
            v = torch.cat((v, self._split_heads(bias_v.expand(-1, batch, -1)).to(v.dtype)), dim=2)
        if self.add_zero_attn:
            k, v = (nn.functional.pad(tensor, (0, 0, 0, 1)) for tensor in (k, v))
        appended = k.size(2) - keys
        return k, v, mask.with_keys(keys, appended) if appended else mask

    # Incremental decoding: fairseq keeps one dictionary for a whole model and asks each module for its entry.

    @property
    def _state_key(self) -> str:
        return f"{id(self)}.attn_state"

    def _get_input_buffer(self, incremental_state: IncrementalState | None) -> dict[str, Tensor | None]:
        return {} if incremental_state is None else incremental_state.get(self._state_key, {})

    def _set_input_buffer(
        self, incremental_state: IncrementalState, buffer: dict[str, Tensor | None]
    ) -> IncrementalState:
        incremental_state[self._state_key] = buffer
        return incremental_state

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> IncrementalState:
        """Follow the beam: entry i of the batch of saved keys and values becomes the old entry ``new_order[i]``.

        Keys of an encoder belong to sentences, not to hypotheses: as in fairseq they stay while no sentence leaves
        the batch, and are picked by sentence where ``beam_size`` says that they are kept once a sentence.
        """
        buffer = self._get_input_buffer(incremental_state)
        if not buffer:
            return incremental_state
        if self.encoder_decoder_attention:
            if buffer["prev_key"].size(0) * self.beam_size == new_order.size(0):
                return incremental_state
            if self.beam_size > 1:
                new_order = new_order[:: self.beam_size] // self.beam_size
        if _keeps_order(new_order, buffer["prev_key"].size(0)):
            return incremental_state
        buffer, cache = dict(buffer), buffer.get("cache")
        names = [name for name in ("prev_key", "prev_value") if name in buffer]
        if cache is not None and cache.continues([buffer[name] for name in names]):
            cache = buffer["cache"] = cache.select(new_order)
            buffer.update(zip(names, cache.views(), strict=True))
        else:
            buffer.pop("cache", None)
            buffer.update((name, buffer[name].index_select(0, new_order)) for name in names)
        padding = buffer.get("prev_key_padding_mask")
        buffer["prev_key_padding_mask"] = None if padding is None else padding.index_select(0, new_order)
        self._set_input_buffer(incremental_state, buffer)
        return incremental_state

    def set_beam_size(self, beam_size: int) -> None:
        """Say that each sentence has ``beam_size`` hypotheses in a row, so that encoder keys are kept once a sentence."""
        self.beam_size = beam_size

    # Weights of one shape can mean different things: 4 heads or 8, embeddings added or multiplied. So a saved state says
    # what its layers computed, beside the version that torch keeps of each module; states of other code do not.

    def _meaning(self) -> dict[str, int | str]:
        sizes = {"num_heads": self.num_heads, "head_dim": self.head_dim}
        return sizes | {axis: getattr(self.spec, axis) for axis in ("projection", "activation", "mixing")}

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata.setdefault(prefix[:-1], {})["attention"] = self._meaning()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
        _part_projections(state_dict, prefix)
        saved = local_metadata.get("attention", {})
        self._start_mixing(state_dict, prefix, saved.get("mixing"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        for name, ours in self._meaning().items():
            theirs = saved.get(name, ours)
            # mixing that is learned starts as the identity: what had none goes on
            if theirs != ours and not (name == "mixing" and theirs == "none" and list(self.mixing.parameters())):
                errors.append(f"{prefix[:-1]} was saved with {name}={theirs} and is loaded with {ours}")

    def __prepare_scriptable__(self) -> nn.Module:
        """What ``torch.jit.script`` asks first, of a module inside another one too."""
        raise NotImplementedError(_NO_TORCHSCRIPT)

    # Here and not when fairseq upgrades the checkpoint, which is before it renumbers the layers it keeps of it.
    def _start_mixing(self, state_dict: dict[str, Tensor], prefix: str, saved: str | None) -> None:
        """Give a state that never had mixing this layer's start. What another state lacks is lost, and stays missing.

        Args:
            saved: the mixing that the state says it was saved with; ``None`` in states of other code, such as fairseq's.
        """
        starts = {} if self.mixing is None else self.mixing.state_dict(prefix=f"{prefix}mixing.")
        if saved == "none" or (saved is None and not starts.keys() & state_dict.keys()):
            for name, start in starts.items():
                state_dict.setdefault(name, start)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Split the joint projections of old fairseq checkpoints."""
        _part_projections(state_dict, f"{name}." if name else "")


def _part_projections(state_dict: dict[str, Tensor], prefix: str) -> None:
    """Give the projections of old fairseq checkpoints and of ``torch.nn.MultiheadAttention`` the names of ours."""
    for kind in ("weight", "bias"):
        joint = state_dict.pop(f"{prefix}in_proj_{kind}", None)
        parts = () if joint is None else joint.chunk(3)
        for projection, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=False):
            state_dict[f"{prefix}{projection}.{kind}"] = part
    for projection in ("q_proj", "k_proj", "v_proj"):
        if f"{prefix}{projection}_weight" in state_dict:
            state_dict[f"{prefix}{projection}.weight"] = state_dict.pop(f"{prefix}{projection}_weight")


def _transposed(query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """With their first two dimensions exchanged; what is one tensor stays one."""
    swapped_query = query.transpose(0, 1)
    swapped_key = swapped_query if key is query else None if key is None else key.transpose(0, 1)
    swapped_value = swapped_key if value is key else None if value is None else value.transpose(0, 1)
    return swapped_query, swapped_key, swapped_value


def _split_beams(tensor: Tensor, beam: int) -> Tensor:
    """``[B, H, beam*T, N]`` to ``[B*beam, H, T, N]``."""
    return tensor if beam == 1 else tensor.unflatten(2, (beam, -1)).transpose(1, 2).flatten(0, 1)


def _keeps_order(order: Tensor, batch: int) -> bool:
    """Whether every entry stays where it is. Not asked of a GPU, where the answer would take longer than the copy."""
    return order.device.type == "cpu" and torch.equal(order, torch.arange(batch))


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same one, or equal views of the same memory."""
    return first is second or (
        first.data_ptr() == second.data_ptr() and first.shape == second.shape and first.stride() == second.stride()
    )


def _join_padding(saved: Tensor | None, new: Tensor | None, keys: Tensor, new_keys: int) -> Tensor | None:
    """Padding of saved and new keys; where one part has none it is all real. ``new`` may already cover every key."""
    batch, total = keys.size(0), keys.size(2)
    if new is not None and new.size(1) == total:
        return new
    if saved is None and new is None:
        return None
    real = keys.new_zeros((), dtype=torch.bool)
    saved = real.expand(batch, total - new_keys) if saved is None else saved.bool()
    new = real.expand(batch, new_keys) if new is None else new.bool()
    return torch.cat((saved, new), dim=1)


def build_attention(
    preset: str,
    embed_dim: int,
    num_heads: int,
    *,
    self_attention: bool = False,
    encoder_decoder_attention: bool = False,
    kdim: int | None = None,
    vdim: int | None = None,
    dropout: float | nn.Module = 0.0,
    bias: bool = True,
    add_bias_kv: bool = False,
    add_zero_attn: bool = False,
    batch_first: bool = False,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    wrap_projection: Callable[[nn.Module], nn.Module] = lambda projection: projection,
    **axes: int | str | None,
) -> MultiheadAttention:
    """The attention layer of a preset, with any axis (``head_dim``, ``projection``, ``activation``, ``mixing``) put over it.

    Args:
        preset: one of :data:`~fairseq_lowrank.attention.PRESETS`.
        device: where the parameters are made, by default on torch's default device.
        dtype: of the parameters, by default torch's default dtype.
        axes: axis values that win over the preset's; ``None`` leaves the preset's.

    The other arguments are those of :class:`MultiheadAttention`. The layer fits in the place of
    ``torch.nn.MultiheadAttention``, whose state ``mha`` loads.

    Raises:
        ValueError: an unknown preset, axis or value, or sizes that do not fit.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype={dtype!r}: expected a float dtype such as torch.float32")
    with nullcontext() if device is None else _device(device):
        layer = MultiheadAttention(
            AttentionSpec.from_preset(preset, **axes),
            embed_dim,
            num_heads,
            kdim=kdim,
            vdim=vdim,
            dropout=dropout,
            bias=bias,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            self_attention=self_attention,
            encoder_decoder_attention=encoder_decoder_attention,
            batch_first=batch_first,
            backend=backend,
            wrap_projection=wrap_projection,
        )
    return layer if dtype is None else layer.to(dtype)


def _device(device: torch.device | str | int) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r}: expected a device of torch such as 'cpu', 'cuda:0', 'meta'") from error
