"""The attention layer: a projection, the operation, and what stands around them. It knows no projection by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairseq_lowrank.attention.appended import AppendedKeys
from fairseq_lowrank.attention.decoding import Decoding, IncrementalState, beams, join_beams, split_beams
from fairseq_lowrank.attention.dropout import AttentionDropout
from fairseq_lowrank.attention.inputs import check_layout, check_tensors, transposed
from fairseq_lowrank.attention.masks import CAUSAL, attention_mask, is_right_padding
from fairseq_lowrank.attention.mixing import MIXINGS, SCORE_MIXINGS
from fairseq_lowrank.attention.projections.projection import Memory
from fairseq_lowrank.attention.scores import Setting
from fairseq_lowrank.attention.spec import AttentionSpec
from fairseq_lowrank.attention.states import SavedWithMeaning
from fairseq_lowrank.attention.torch_module import InPlaceOfTorchs
from fairseq_lowrank.ops import AttentionCall, AttentionMask, HeadMixing, attention
from fairseq_lowrank.ops.activation import ACTIVATIONS
from fairseq_lowrank.ops.attention import check_backend, reference
from fairseq_lowrank.ops.attention.call import check_rate


class Attended(NamedTuple):
    """A forward pass of a layer, for its ``regulariser``, which returns the heads to go on with.

    Args:
        layer: where.
        call: what was computed.
        heads: ``[B, H, T, .]`` that came of it.
        query_padding: ``[B, T]`` bool, true at queries that are padding; ``None`` also in cross attention, which is told
            nothing of it.
    """

    layer: MultiheadAttention
    call: AttentionCall
    heads: Tensor
    query_padding: Tensor | None


class MultiheadAttention(AppendedKeys, Decoding, SavedWithMeaning, InPlaceOfTorchs):
    """Multi-head attention composed from a spec.

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
        dropout: probability of dropping an attention weight, or a module with ``p``, such as ``nn.Dropout``, which may have
            ``apply_during_inference``, as ``FairseqDropout`` has.
        bias: whether the projections add a bias.
        add_bias_kv: append a learned key and value.
        add_zero_attn: append a key and value of zeros.
        self_attention: query, key and value are the same tensor.
        encoder_decoder_attention: keys and values come from an encoder.
        batch_first: query, key, value and output are ``[batch, time, .]`` instead of ``[time, batch, .]``.
        max_positions: the most positions of a sentence: the synthesizers need it, and other scores take any.
        unused_key_projection: have ``k_proj`` where the dense synthesizer computes nothing with it; its gradient is zero.
        backend: see :func:`fairseq_lowrank.ops.attention`; where weights are asked for, any that can return them.
        wrap_projection: applied to each projection when it is made, e.g. fairseq's ``quant_noise``.

    Attributes:
        regulariser: sees the heads of every forward pass, see :class:`Attended`.

    Raises:
        ValueError: sizes that do not fit together, or a backend that cannot compute the spec.
    """

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
        max_positions: int | None = None,
        unused_key_projection: bool = False,
        backend: str = "auto",
        wrap_projection: Callable[[nn.Module], nn.Module] = lambda projection: projection,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.projection = spec.projection_of(embed_dim, num_heads, self.kdim, self.vdim)
        setting = Setting(
            encoder_decoder_attention,
            add_bias_kv or add_zero_attn,
            max_positions,
            unused_key_projection=unused_key_projection,
        )
        self.score = spec.score_of(self.projection, setting)
        self.head_dim = self.projection.sizes.head_dim
        self.scaling = self.head_dim**-0.5
        self.self_attention = self_attention
        self.encoder_decoder_attention = encoder_decoder_attention
        self.add_zero_attn = add_zero_attn
        self.batch_first = batch_first
        self.backend = backend
        self.regulariser: Callable[[Attended], Tensor] | None = None
        self.dropout_module = dropout if isinstance(dropout, nn.Module) else AttentionDropout(dropout)
        check_rate("dropout", self.dropout_module.p)

        # Made, and started below, in fairseq's order: the same seed gives the same weights as fairseq's own module.
        def linear(inputs: int, outputs: int, bias: bool = bias) -> nn.Module:
            return wrap_projection(nn.Linear(inputs, outputs, bias=bias))

        self.score.make(self, linear)
        self.out_proj = linear(num_heads * self.projection.sizes.value_dim, embed_dim)
        self.make_appended(add_bias_kv)
        self.reset_parameters()
        self.projection.make_further(self)
        self.score.make_further(self, linear)
        builders = {"score_mixing": SCORE_MIXINGS[spec.score_mixing], "mixing": MIXINGS[spec.mixing]}
        for name, build in builders.items():
            setattr(self, name, build(num_heads, self.head_dim))
        self.keep_mixing_starts(builders)
        check_backend(backend, self._smallest_call())

    def reset_parameters(self) -> None:
        """Fairseq's starts of the projections (what else there is starts where it is made)."""
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
        *,
        need_weights: bool = True,
        attn_mask: Tensor | AttentionMask | str | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
        is_causal: bool = False,
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from ``query`` to ``key`` and ``value``.

        Args:
            query: ``[T, B, embed_dim]``; with ``batch_first`` ``[B, T, embed_dim]``, and key, value and output likewise.
            key: ``[S, B, kdim]``; ``None`` takes the saved keys and values as they are.
            value: ``[S, B, vdim]``.
            key_padding_mask: ``[B, S]``, true at padding.
            incremental_state: a dictionary in which keys and values of earlier steps are kept while decoding.
            need_weights: return the weights the layer used (mixed, before dropout), averaged over heads.
            attn_mask: ``[T, S]`` float (added) or bool (hidden where true), or :data:`~.masks.CAUSAL`.
            before_softmax: return masked scores ``[B*H, T, S]`` and values ``[B*H, S, value_dim]`` instead.
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
        self.refuse_tracing()
        check_tensors(self, query, key, value)
        if self.batch_first:
            query, key, value = transposed(query, key, value)
        if key is not None and incremental_state is None:
            check_layout(self, query, key, key_padding_mask, attn_mask)
        queries, batch, _ = query.shape
        attn_mask = CAUSAL if is_causal and attn_mask is None else attn_mask
        need_weights = need_weights or need_head_weights
        memory, key_padding_mask = self.remember(key, value, key_padding_mask, incremental_state)
        unknown = key_padding_mask is None or self.encoder_decoder_attention
        query_padding = None if unknown else key_padding_mask[:, -queries:].bool()
        key_batch, _, keys, _ = next(iter(memory.values())).shape
        mask = attention_mask(attn_mask, key_padding_mask, (key_batch, self.num_heads, queries, keys))
        memory, mask = self.append_keys(memory, mask)
        beam = beams(batch, key_batch, self.beam_size)
        q = join_beams(self.score.project_query(self, query), beam)
        mask = mask.repeat_queries(beam)
        if before_softmax:
            call = self._call(q, memory, mask, whole_scores=True)
            scores = reference.masked_scores(call).expand(-1, self.num_heads, -1, -1)
            return split_beams(scores, beam).flatten(0, 1), self.projection.head_values(self, memory).flatten(0, 1)
        if self.self_attention and mask.causal and mask.key_padding is not None and not need_weights:
            # Queries at real positions see none of the padding to their right.
            mask = replace(mask, key_padding=None) if is_right_padding(mask.key_padding) else mask

        heads, weights = self._attend(q, memory, mask, need_weights, query_padding)
        output = self.out_proj(split_beams(heads, beam).permute(2, 0, 1, 3).flatten(2))
        output = output.transpose(0, 1) if self.batch_first else output
        if weights is None:
            return output, None
        weights = split_beams(weights, beam)
        if need_head_weights:
            return output, weights.transpose(0, 1)
        return output, weights.mean(dim=1) if average_attn_weights else weights

    def _attend(
        self, q: Tensor, memory: Memory, mask: AttentionMask, need_weights: bool, query_padding: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Heads ``[B, H, T, D]`` and their weights."""
        dropping = self.training or getattr(self.dropout_module, "apply_during_inference", False)
        dropout_p = self.dropout_module.p if dropping else 0.0
        call = self._call(q, memory, mask, dropout_p=dropout_p, need_weights=need_weights)
        heads, weights = attention(call, "auto" if need_weights else self.backend)
        if self.regulariser is not None:
            heads = self.regulariser(Attended(self, call, heads, query_padding))
        heads = self.projection.finish(self, heads, call).expand(-1, self.num_heads, -1, -1)
        return heads, None if weights is None else weights.expand(-1, self.num_heads, -1, -1)

    def _call(
        self,
        q: Tensor,
        memory: Memory,
        mask: AttentionMask,
        *,
        whole_scores: bool = False,
        dropout_p: float = 0.0,
        **asked: bool,
    ) -> AttentionCall:
        """What is asked of attention; with ``whole_scores`` the scores have what the activation would cancel too."""
        # One query for all heads attends once, its heads being copies of each other, unless something tells them apart, as
        # dropout does, or compares them.
        mixes = self.score_mixing is not None or self.mixing is not None
        if mixes or dropout_p or mask.differs_by_head or self.regulariser is not None:
            q = q.expand(-1, self.num_heads, -1, -1)
        parts = self._parts(q)
        whole_scores = whole_scores or not ACTIVATIONS[self.spec.activation].shift_invariant
        unit_rows = self.mixing is None and not dropout_p
        scores, v = self.score.attend_to(self, q, memory, mask, whole_scores=whole_scores, unit_rows=unit_rows)
        return AttentionCall(scores, v, mask, dropout_p=dropout_p, **parts, **asked)

    @torch.no_grad()
    def _smallest_call(self) -> AttentionCall:
        """What is asked of attention for one query and one key."""
        q = torch.empty(1, self.num_heads, 1, self.head_dim)
        groups = self.projection.memory_heads
        memory = {name: torch.empty(1, groups, 1, size) for name, size in self.score.memory_sizes.items()}
        self.eval()  # a projection wrapped in quantisation noise would draw some
        call = self._call(q, memory, AttentionMask(), dropout_p=self.dropout_module.p)
        self.train()
        return call

    def _parts(self, q: Tensor) -> dict[str, str | HeadMixing | None]:
        """The activation, and what mixes the scores and the probabilities of the heads' own queries."""
        modules = {"score_mixing": self.score_mixing, "prob_mixing": self.mixing}
        mixings = {name: None if module is None else module.operation(q) for name, module in modules.items()}
        return {"activation": self.spec.activation, **mixings}
