"""The attention layer: projections, the attention operation, and the output projection."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairseq_lowrank.attention.appended import append_keys, build_appended
from fairseq_lowrank.attention.core import PartsOwner
from fairseq_lowrank.attention.decoding import (
    IncrementalCache,
    IncrementalState,
    LayerCache,
    infer_beam_size,
    join_beams,
    split_beams,
)
from fairseq_lowrank.attention.dropout import AttentionDropout
from fairseq_lowrank.attention.inputs import check_dtype, check_layout, check_tensors, transposed
from fairseq_lowrank.attention.masks import CAUSAL, attention_mask, split_key_padding
from fairseq_lowrank.attention.torch_module import TorchMHACompat
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.ops import AttentionCall, AttentionMask, DotProduct
from fairseq_lowrank.ops.attention import check_backend, reference
from fairseq_lowrank.ops.attention.call import check_rate
from fairseq_lowrank.ops.attention.padding import is_right_padding
from fairseq_lowrank.parts import AttentionConfig, Context, RotaryPositions, parts_of
from fairseq_lowrank.parts.projection import KeyValueStates, merge_heads
from fairseq_lowrank.parts.stages import NO_CONTEXT, FilledSteps, Steps, declared, take_step


class RegularizerInput(NamedTuple):
    """A forward pass of a layer, for its ``regulariser``, which returns the heads to continue with.

    Args:
        layer: the layer.
        call: what was computed.
        heads: ``[B, H, T, .]``, the result.
        query_padding: ``[B, T]`` bool, true at queries that are padding; ``None`` also in cross attention, which does not know it.
    """

    layer: MultiheadAttention
    call: AttentionCall
    heads: Tensor
    query_padding: Tensor | None


class MultiheadAttention(TorchMHACompat, PartsOwner):
    """Multi-head attention composed from a configuration.

    ::

        query ─ q_proj ─┐
        key ─── k_proj ─┼─ heads (+ head_embeddings) ─ scores ─ mask ─ activation ─ mixing ─ dropout ─ values ─ out_proj
        value ─ v_proj ─┘

    Args:
        config: the choice on every axis, the sizes, and the place in a model.
        dropout: probability of dropping an attention weight, or a module with ``p``, such as ``nn.Dropout``. A module may have
            ``apply_during_inference``, like ``FairseqDropout``.
        wrap_projection: applied to each projection when it is built, e.g. fairseq's ``quant_noise``; by default nothing is.

    Attributes:
        regulariser: sees the heads of every forward pass, see :class:`RegularizerInput`.
        beam_size: how many hypotheses in a row may share the keys of one batch entry.
        outputs_at_padding: something reads outputs at padding, so padding is hidden from them too; without it, causal layers may
            leave padding on the right visible to them.

    Raises:
        ValueError: sizes that do not fit together, or a backend that cannot compute the configuration.
    """

    beam_size = 1
    outputs_at_padding = False
    k_proj: Any
    v_proj: Any
    q_proj: Any
    out_proj: Any
    dropout_module: Any

    def __init__(
        self,
        config: AttentionConfig,
        *,
        dropout: float | nn.Module = 0.0,
        wrap_projection: Callable[[nn.Linear], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.projection = config.build_projection()
        self.score = config.build_score(self.projection)
        self.config = config = self.projection.config
        self.spec = config.spec
        self.embed_dim, self.num_heads, self.head_dim = config.embed_dim, config.num_heads, config.head_dim
        self.kdim, self.vdim = config.kdim, config.vdim
        self.self_attention = config.self_attention
        self.encoder_decoder_attention = config.encoder_decoder_attention
        self.add_zero_attn, self.batch_first, self.backend = config.add_zero_attn, config.batch_first, config.backend
        self.cache = IncrementalCache()
        self.regulariser: Callable[[RegularizerInput], Tensor] | None = None
        self.dropout_module = dropout if isinstance(dropout, nn.Module) else AttentionDropout(dropout)
        check_rate("dropout", self.dropout_module.p)

        # Parameters are built and initialised in fairseq's order: the same seed gives the same weights as fairseq's module.
        def linear(inputs: int, outputs: int, bias: bool = config.bias) -> nn.Module:
            projection = nn.Linear(inputs, outputs, bias=bias)
            return projection if wrap_projection is None else wrap_projection(projection)

        self._adopt(self.score.build_projections(linear))
        self.out_proj = linear(self.num_heads * config.value_dim, self.embed_dim)
        state_sizes, state_heads = self.score.state_sizes, self.projection.state_heads
        self._state_heads = {name: self.projection.state_groups.get(name, state_heads) for name in state_sizes}
        self.bias_k, self.bias_v = build_appended(state_sizes, state_heads, config.add_bias_kv)
        self._score_heads = self.num_heads * config.queries_per_head
        self.rotary = config.rotary
        self._check_choices()
        self._reset_projections()
        self._adopt(self.projection.build_extra_parameters())
        self.projection.reset_parameters(self)
        self._adopt(self.score.build_extra_parameters(linear))
        self.score.reset_parameters(self)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.projection.score_size, eps=1e-6) if config.qk_norm else None for _ in ("query", "key")
        )
        # Keys that are computed from the cache in each step are normalised and turned after that.
        self._late_keys = config.qk_norm and "key" not in self.score.state_sizes
        self._build_parts(self.projection.query_size)
        self._cancels_row_constants = config.spec.shift_invariant
        names = ("num_heads", "head_dim", "value_dim", "key_value_heads", "add_zero_attn", "qk_norm")
        sizes = {name: getattr(config, name) for name in names} | {"rotary": self.rotary is not None}
        if isinstance(self.rotary, RotaryPositions):
            sizes["rotary_base"] = self.rotary.base
        self._record_config(sizes | self.score.state_config, (self.projection, self.score), ("rotary",))
        if config.backend != "auto":
            check_backend(config.backend, self._smallest_call())

    def _adopt(self, built: dict[str, Any]) -> None:
        """Register what the projection or the score function built, under fairseq's names."""
        for name, module in built.items():
            setattr(self, name, module)

    def _check_choices(self) -> None:
        """Check choices that do not fit this layer's place in a model.

        Raises:
            ValueError: a part that does not work in such a layer, or positions in a layer that has none.
        """
        self.config.check_place()
        if self.rotary is None:
            return
        if not self.projection.rotary_size:
            raise ValueError(
                f"rotary with projection {self.spec.projection!r}: it caches no features that turn. Give their number, rotary_dim=N, or "
                "remove rotary."
            )
        if isinstance(self.rotary, RotaryPositions):
            of_heads = self.projection.rotary_state == "key"
            self.rotary.check_size(self.projection.rotary_size, "head_dim" if of_heads else "rotary_dim")
        if not self.self_attention or self.config.has_appended_keys:
            raise ValueError(
                "rotary needs queries and keys of one sequence, each with a position. Use self_attention=True, without "
                "encoder_decoder_attention, add_bias_kv and add_zero_attn."
            )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._reset_projections()
        self.projection.reset_parameters(self)
        self.score.reset_parameters(self)

    def _reset_projections(self) -> None:
        """Initialise the projections as fairseq does."""
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

    @property
    def cached_sizes(self) -> dict[str, tuple[int, int]]:
        """The heads and the size of each tensor that is cached while decoding, by name."""
        sizes = {name: (self._state_heads[name], size) for name, size in self.score.state_sizes.items()}
        for part in parts_of(self).values():
            sizes |= {name: (self.num_heads, size) for name, size in declared(part).state_sizes.items()}
        return sizes

    @property
    def cached_numbers(self) -> int:
        """The number of values that are cached for each token while decoding."""
        return sum(heads * size for heads, size in self.cached_sizes.values())

    def extra_repr(self) -> str:
        return f"{self.spec}, num_heads={self.num_heads}, head_dim={self.head_dim}, backend={self.backend}"

    # --- the forward pass

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
            key: ``[S, B, kdim]``; ``None`` takes the cached keys and values as they are.
            value: ``[S, B, vdim]``.
            key_padding_mask: ``[B, S]``, true at padding; a float one is added to the scores and hides where it is −inf.
            incremental_state: a :class:`~.decoding.DecodingCache`, or a dictionary, that keeps keys and values of earlier steps.
            need_weights: return the weights that the layer used (mixed, before dropout), averaged over heads.
            attn_mask: ``[T, S]`` float (added) or bool (hidden where true), :data:`~.masks.CAUSAL`,
                :func:`~.masks.SlidingWindow`, :func:`~.masks.PackedDocuments`, :func:`~.masks.Prefix`, or a ``mask_mod`` or
                ``BlockMask`` of FlexAttention.
            before_softmax: return masked scores ``[B*H, T, S]`` and values ``[B*H, S, value_dim]`` instead.
            need_head_weights: return the weights of each head (implies ``need_weights``).
            is_causal: :data:`~.masks.CAUSAL` if there is no ``attn_mask``. With an ``attn_mask`` it changes nothing.
            average_attn_weights: if false, return the weights of each head.

        Returns:
            ``[T, B, embed_dim]`` output, and the weights ``[B, T, S]``, with ``need_head_weights`` ``[H, B, T, S]`` (as
            fairseq has them), without ``average_attn_weights`` ``[B, H, T, S]`` (as torch has them), or ``None``.

        Raises:
            ValueError: tensors or masks that do not fit this layer.
        """
        children: dict[str, Any] = self._modules  # a quick way to what nn.Module finds last among its attributes
        self._check_inputs(children, query, key, value)
        if self.batch_first:
            query, key, value = transposed(query, key, value)
        hidden_keys, key_bias = split_key_padding(key_padding_mask)
        self._check_masks(query, key, hidden_keys, key_bias, attn_mask, cached=incremental_state is not None)
        need_weights = need_weights or need_head_weights

        filled = self.core.filled(self)
        steps = filled.steps
        # Cached states: the tensors from which keys and values are made, with those of earlier steps.
        cache = self._key_value_states(steps, key, value, hidden_keys, incremental_state)
        states, key_padding_mask = cache.tensors, cache.padding

        # Queries: those of the heads. The hypotheses of a sentence are further queries to its keys.
        queries, batch, _ = query.shape
        key_batch, _, keys, _ = next(iter(states.values())).shape
        beam = 1 if batch == key_batch else infer_beam_size(batch, key_batch, self.beam_size)
        q = join_beams(self._project_query(steps, query), beam)
        context = self._context(filled, query, q, states, keys - queries, beam) if steps else NO_CONTEXT

        # The mask: which keys each query sees.
        if is_causal and attn_mask is None:
            attn_mask = CAUSAL
        mask = attention_mask(attn_mask, key_padding_mask, (key_batch, self.num_heads, queries, keys), key_bias)
        shows_padding = not (need_weights or before_softmax or self.outputs_at_padding)
        states, mask = self._finished_mask(states, mask, beam, shows_padding)
        check = mask.additive is not None or isinstance(attn_mask, AttentionMask)
        if before_softmax:
            scores, values = self._scores(filled, q, states, mask, context, check)
            self._keep(incremental_state, cache)
            return split_beams(scores, beam).flatten(0, 1), values.flatten(0, 1)

        # Core attention, and the output projection.
        dropout_p = self._dropout_p(children["dropout_module"])
        call = self._call(filled, q, states, mask, dropout_p=dropout_p, need_weights=need_weights)
        finish = functools.partial(self._finish_heads, key_padding_mask, queries)
        heads, weights = self.core.run(self, filled, call, context, self.backend, check=check, finish=finish)
        output = children["out_proj"](merge_heads(heads if beam == 1 else split_beams(heads, beam)))
        self._keep(incremental_state, cache)  # after the last error that a call can raise, so that it can be repeated
        if weights is not None:
            weights = _returned_weights(weights, beam, need_head_weights, average_attn_weights)
        return output.transpose(0, 1) if self.batch_first else output, weights

    def _check_masks(
        self,
        query: Tensor,
        key: Tensor | None,
        hidden_keys: Tensor | None,
        key_bias: Tensor | None,
        attn_mask: object,
        *,
        cached: bool,
    ) -> None:
        """Check that masks have the layout of the tensors, and that a cache need not keep what a float padding mask adds."""
        if key is not None and not cached:
            check_layout(self.config, query, key, hidden_keys, attn_mask, beams=self.beam_size > 1)
        if key_bias is not None and cached:
            raise ValueError(
                "a float key_padding_mask with incremental_state: what it adds is not cached. Use a bool mask, or attn_mask."
            )

    def _keep(self, incremental_state: IncrementalState | None, cache: LayerCache) -> None:
        """Keep the cached keys and values for the next step, if there is one."""
        if incremental_state is not None:
            self.cache.set(incremental_state, cache)

    def _check_inputs(self, children: dict[str, Any], query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
        """Check that the layer has values, and that it takes tensors of these sizes and dtypes.

        Raises:
            ValueError: it has none, or it does not.
        """
        if self._made_on_meta and isinstance(query, Tensor) and not query.is_meta:
            self._check_values()
        check_tensors(self.config, query, key, value)
        check_dtype(query, "query", children.get("q_proj"))
        if key is not query and key is not None:
            check_dtype(key, "key", children.get("k_proj"))
        if value is not key and value is not None:
            check_dtype(value, "value", children.get("v_proj"))

    def _finish_heads(
        self, padding: Tensor | None, queries: int, call: AttentionCall, heads: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return heads and weights of a call as the regulariser and the projection leave them, for all heads."""
        if self.regulariser is not None:
            padding = None if padding is None or self.encoder_decoder_attention else padding[:, -queries:]
            heads = self.regulariser(RegularizerInput(self, call, heads, padding))
        heads = self.projection.finalize_heads(self, heads, call)
        return self._of_all_heads(heads), None if weights is None else self._of_all_heads(weights)

    def _finished_mask(
        self, states: KeyValueStates, mask: AttentionMask, beam: int, shows_padding: bool
    ) -> tuple[KeyValueStates, AttentionMask]:
        """Return states and mask with appended keys, for the queries of ``beam`` hypotheses.

        Args:
            shows_padding: padding may see padding, as nobody reads its outputs.
        """
        if mask.counts_queries and self.encoder_decoder_attention:
            raise ValueError(
                "attn_mask of a rule or of documents in cross attention: queries have no position among the keys. Use a mask "
                "[B, H, T, S]."
            )
        if self.config.queries_per_head > 1:
            mask = mask.repeat_heads(self.num_heads, self.config.queries_per_head)
        if self.config.has_appended_keys:
            states, mask = append_keys(states, mask, (self.bias_k, self.bias_v), self.add_zero_attn)
        if shows_padding and self.self_attention and mask.key_padding is not None and mask.sees_no_later_key:
            # Queries at real positions see none of the padding to their right.
            mask = mask.replace(key_padding=None) if is_right_padding(mask.key_padding) else mask
        return states, mask.repeat_queries(beam) if beam > 1 else mask

    def _scores(
        self, filled: FilledSteps, q: Tensor, states: KeyValueStates, mask: AttentionMask, context: Context, check: bool
    ) -> tuple[Tensor, Tensor]:
        """Return masked scores ``[B, H, T, S]`` and the values of heads, as fairseq's ``before_softmax``."""
        call = self._call(filled, q, states, mask, keep_row_constants=True)
        if check:
            call.check()
        call = take_step(filled.steps, "call", call, context.widened())
        return self._of_all_heads(reference.masked_scores(call)), self.projection.expand_values(self, states)

    def _of_all_heads(self, heads: Tensor) -> Tensor:
        """Return heads, where one may stand for all."""
        return heads if heads.size(1) == self._score_heads else heads.expand(-1, self._score_heads, -1, -1)

    def project_query(self, query: Tensor) -> Tensor:
        """Return the queries that mixing reads, ``[B, H, T, D]``, for ``query [T, B, embed_dim]``."""
        return self._of_all_heads(self._project_query(self.core.filled(self).steps, query))

    def _project_query(self, steps: Steps, query: Tensor) -> Tensor:
        q = self.score.project_query(self, query)
        if q.size(1) != self._score_heads:
            self._check_heads(q)
        if "queries" in steps:
            q = take_step(steps, "queries", q, Context(query.transpose(0, 1)).widened())
        return q if self.q_norm is None else self.q_norm(q)

    def _check_heads(self, q: Tensor) -> None:
        """Check that this worker has the queries of all heads.

        Raises:
            UserError: tensor parallelism has split them.
        """
        width, weight = q.size(1) * q.size(3), getattr(self.q_proj, "weight", None)
        if isinstance(weight, Tensor) and width < weight.size(0):  # that of a quantised layer is a method
            raise _split("queries", width, weight.size(0))

    def _context(
        self,
        filled: FilledSteps,
        query: Tensor,
        q: Tensor,
        states: KeyValueStates,
        first: int,
        beam: int,
    ) -> Context:
        """Return what parts may read. Heads that are copies of each other are made several."""
        inputs = own_values = None
        if filled.reads_inputs:
            inputs = query.transpose(0, 1)
            inputs = inputs if beam == 1 else join_beams(inputs[:, None], beam)[:, 0]
        if filled.reads_own_value:
            own = {name: cached[:, :, -query.size(0) :] for name, cached in states.items()}
            own_values = self.projection.expand_values(self, own)
        return Context(inputs, self._of_all_heads(q), states, first, beam, own_values)

    def _key_value_states(
        self,
        steps: Steps,
        key: Tensor | None,
        value: Tensor | None,
        padding: Tensor | None,
        state: IncrementalState | None,
    ) -> LayerCache:
        """Return the tensors from which keys and values are made, with those of earlier steps, and their padding."""
        if key is None or value is None:
            cache = self.cache.get(state)
            if cache is None or key is not None or value is not None:
                raise ValueError(
                    "key and value may be None only together, and only if incremental_state has saved ones. Pass both."
                )
            return cache
        states = self.score.project_key_value(self, key, value)
        for name, heads in self._state_heads.items():
            if states[name].size(1) < heads:  # fewer heads would be read as groups of heads
                raise _split(f"heads of {name}", states[name].size(1), heads)
        if "states" in steps:
            context = Context(key.transpose(0, 1), first=self.cache.length(state))
            states = take_step(steps, "states", states, context.widened())
        if self.k_norm is not None and not self._late_keys:
            states["key"] = self.k_norm(states["key"])
        if self.rotary is not None and not self._late_keys:
            first = self.cache.length(state)
            keys = states[self.projection.rotary_state]
            positions = torch.arange(first, first + keys.size(2), device=keys.device)
            states[self.projection.rotary_state] = self.rotary(keys, positions)
        return LayerCache(states, padding) if state is None else self.cache.extended(state, states, padding)

    def _call(
        self,
        filled: FilledSteps,
        q: Tensor,
        states: KeyValueStates,
        mask: AttentionMask,
        *,
        keep_row_constants: bool = False,
        dropout_p: float = 0.0,
        need_weights: bool = False,
    ) -> AttentionCall:
        """Build the call without its parts. If ``keep_row_constants``, scores keep terms that the activation would cancel."""
        # One query for all heads attends once, as its heads are copies of each other. Dropout, per-head masks and parts make
        # them different; mixing and regularisers compare them.
        if q.size(1) != self._score_heads and (
            "call" in filled.steps or dropout_p or mask.differs_by_head or self.regulariser is not None
        ):
            q = q.expand(-1, self._score_heads, -1, -1)
        # Mixing reads the queries before they are turned.
        turned = q if self.rotary is None else self._rotated(q, states, mask)
        scores, values = self.score.attention_inputs(
            self,
            turned,
            states,
            mask,
            training=self.training,
            keep_row_constants=keep_row_constants or not self._cancels_row_constants,
            rows_sum_to_one=filled.rows_sum_to_one and not dropout_p,
        )
        if self._late_keys and isinstance(scores, DotProduct):
            scores = scores.replace(k=self._finished_keys(scores.k))
        return self.core.call(scores, values, mask, dropout_p=dropout_p, need_weights=need_weights)

    def _rotated(self, q: Tensor, states: KeyValueStates, mask: AttentionMask) -> Tensor:
        """Return queries whose last one has the position of the last key; several beams count from the same position."""
        assert self.rotary is not None
        count, first = mask.visible_prefix(q.size(2), states[self.projection.rotary_state].size(2))
        return self._turn(q, torch.arange(first, first + count, device=q.device).repeat(mask.query_repeats))

    def _finished_keys(self, keys: Tensor) -> Tensor:
        """Return normalised keys ``[B, H, S, D]``, turned by their positions if the layer has positions."""
        assert self.k_norm is not None
        keys = self.k_norm(keys)
        return keys if self.rotary is None else self._turn(keys, torch.arange(keys.size(2), device=keys.device))

    def _turn(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Return queries or keys whose last features are turned by their positions."""
        assert self.rotary is not None
        if (size := self.projection.rotary_size) == heads.size(3):
            return self.rotary(heads, positions)
        return torch.cat([heads[..., :-size], self.rotary(heads[..., -size:], positions)], dim=-1)

    @torch.no_grad()
    def _smallest_call(self) -> AttentionCall:
        """Build the call for one query and one key."""
        q = torch.empty(1, self._score_heads, 1, self.projection.query_size)
        states = {name: torch.empty(1, heads, 1, size) for name, (heads, size) in self.cached_sizes.items()}
        training = {module: module.training for module in self.modules()}
        self.eval()  # in training mode, a projection wrapped in quantisation noise draws numbers
        filled, query = self.core.filled(self), torch.empty(1, 1, self.embed_dim)
        call = self._call(filled, q, states, AttentionMask(), dropout_p=self.dropout_module.p)
        call = take_step(filled.steps, "call", call, self._context(filled, query, q, states, 0, 1))
        for module, mode in training.items():
            module.training = mode
        return call

    # --- decoding: what fairseq calls on an attention module

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> IncrementalState:
        """Follow the beam: entry i of the batch of cached keys and values becomes the old entry ``new_order[i]``."""
        self.cache.reorder(
            incremental_state,
            new_order,
            encoder_keys=self.encoder_decoder_attention,
            beam_size=self.beam_size,
        )
        return incremental_state


def _returned_weights(weights: Tensor, beam: int, by_head: bool, average: bool) -> Tensor:
    """Return weights ``[H, B, T, S]`` if ``by_head``, else their mean over heads ``[B, T, S]`` or all of them ``[B, H, T, S]``."""
    weights = split_beams(weights, beam)
    if by_head:
        return weights.transpose(0, 1)
    return weights.mean(dim=1) if average else weights


def _split(what: str, here: int, whole: int) -> UserError:
    """Return the error for projections that return a part of their features."""
    return UserError(
        f"{what}: {here} of {whole} are here, so heads are split over workers. Tensor parallelism of attention is not "
        "computed. Leave its projections out of parallelize_module, or use fully_shard."
    )
