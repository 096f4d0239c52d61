"""Core attention: what happens between projected heads and the outputs of heads.

::

    q, k, v ─ scores ─ score mixing ─ bias, mask ─ activation (sinks) ─ mixing ─ dropout ─ · v ─ head output ─ heads

Projections, norms of queries and keys, rotary positions and caches come before it, the output projection after it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_lowrank.attention.dropout import AttentionDropout
from fairseq_lowrank.attention.masks import core_mask
from fairseq_lowrank.attention.states import AttentionConfigInStateDict, StateConfig, record_initial_states
from fairseq_lowrank.attention.watching import changed_call
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.ops import AttentionCall, AttentionMask, DotProduct
from fairseq_lowrank.ops.attention import Scores, check_backend, check_device, compute
from fairseq_lowrank.ops.attention.call import check_rate
from fairseq_lowrank.parts import (
    AXES,
    METHODS,
    MODULE_AXES,
    PARTS,
    SLOTS,
    AttentionConfig,
    AttentionSpec,
    Context,
    LayerPart,
    LayerParts,
    parts_of,
)
from fairseq_lowrank.parts.parameters import wide_defaults
from fairseq_lowrank.parts.part import Value
from fairseq_lowrank.parts.stages import NO_CONTEXT, FilledSteps, run, take_step

BEFORE_HEADS = frozenset(("queries", "states"))
"""The steps of a part that belong to the projections: they come before norms, rotary positions and the cache."""

LAYOUTS = ("BHTD", "BTHD")
"""The orders of batch, heads, time and features that a core takes."""


class Core:
    """Runs the parts that are children of a module, its owner, from scores to the outputs of heads.

    It holds choices and sizes, and no tensors. Each method gets the owner and reads the parts there, for the owner is where adapters,
    hooks, sharding and replicas replace modules. An owner is a layer of this package, a :class:`CoreAttention`, or an attention
    module of another library.

    Args:
        spec: the choice on every axis.
        config: the sizes for which parts were built; ``None`` without parts.
    """

    def __init__(self, spec: AttentionSpec, config: AttentionConfig | None = None) -> None:
        self.config = config
        # Without tensors. A copy with them takes less time than a new one.
        self._settings = AttentionCall(None, None, AttentionMask(), **spec.call_settings)  # type: ignore[arg-type]
        self._filled: FilledSteps | None = None

    def filled(self, owner: nn.Module) -> FilledSteps:
        """Return which steps the parts fill. Any part may be replaced, removed or wrapped between two calls."""
        filled = self._filled
        if filled is None or not filled.is_of(owner):
            filled = FilledSteps.of(owner, MODULE_AXES)
            if not torch.compiler.is_compiling():
                self._filled = filled
        return filled

    def call(self, scores: Scores, values: Tensor, mask: AttentionMask, **fields: Any) -> AttentionCall:
        """Return the call without what the parts do."""
        return self._settings.replace(scores=scores, v=values, mask=mask, **fields)

    def run(
        self,
        owner: nn.Module,
        filled: FilledSteps,
        call: AttentionCall,
        context: Context,
        backend: str = "auto",
        *,
        check: bool = True,
        finish: Callable[[AttentionCall, Tensor, Tensor | None], tuple[Tensor, Tensor | None]] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of heads that the output projection reads, and the weights or ``None``.

        Args:
            check: the call may hold what no backend can compute.
            finish: returns the heads and the weights to continue with, before a part changes them.
        """

        def attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
            if check:
                call.check()
            call = changed_call(owner, call)
            if call.need_weights and backend != "auto":
                check_device(backend, call)  # fused kernels have no weights, so another backend computes them
            heads, weights = compute(call, "auto" if call.need_weights else backend)
            return (heads, weights) if finish is None else finish(call, heads, weights)

        return run(filled.steps, call, context, attend)

    def attend(
        self,
        owner: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        backend: str = "auto",
        *,
        inputs: Tensor | None = None,
        mixing_queries: Tensor | None = None,
        query_start: int | Tensor | None = None,
        scale: float | None = None,
        **fields: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of heads for projected heads, and the weights or ``None``. See :meth:`CoreAttention.forward`.

        Args:
            fields: further fields of :class:`AttentionCall`.
        """
        filled = self.filled(owner)
        if self.config is not None:
            check_heads(self.config, q, k, v)
            mask = mask.repeat_heads(self.config.num_heads, self.config.queries_per_head)
        if query_start is not None:
            k, v, mask = self._started(filled, q, k, v, mask, query_start)
            if (bias := fields.get("score_bias")) is not None:
                fields["score_bias"] = bias[..., : k.size(2)]
        call = self.call(DotProduct(q, k, scale), v, mask, **fields)
        own = q if mixing_queries is None else mixing_queries
        context = self._context(filled, own, k, v, inputs, query_start) if filled.steps else NO_CONTEXT
        return self.run(owner, filled, call, context, backend)

    def _started(
        self, filled: FilledSteps, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, start: int | Tensor
    ) -> tuple[Tensor, Tensor, AttentionMask]:
        """Return keys, values and the mask for queries that begin at a position.

        Raises:
            ValueError: a query has no key at its position, and something reads it.
        """
        if isinstance(start, Tensor) or not mask.causal:
            mask = mask.starting_at(start, (*q.shape[:3], k.size(2)), q.device)
        if isinstance(start, Tensor):
            return k, v, mask
        keys = start + q.size(2)
        if start < 0 or (keys > k.size(2) and (mask.reads_own_key or filled.reads_positions)):
            raise ValueError(
                f"query_start={start}: the last of {q.size(2)} queries has position {keys - 1}, and there are {k.size(2)} keys. "
                "Pass the number of keys before the first query."
            )
        if not mask.causal or keys == k.size(2):
            return k, v, mask
        return k[:, :, :keys], v[:, :, :keys], mask.of_first_keys(keys)  # later slots hold nothing yet

    def _context(
        self, filled: FilledSteps, q: Tensor, k: Tensor, v: Tensor, inputs: Tensor | None, start: int | Tensor | None
    ) -> Context:
        """Return what parts may read.

        Raises:
            ValueError: a part reads what is not given.
        """
        assert self.config is not None
        if filled.reads_inputs:
            expected = [q.size(0), q.size(2), self.config.embed_dim]
            if inputs is None or list(inputs.shape) != expected:
                given = "none" if inputs is None else f"{list(inputs.shape)}"
                raise ValueError(
                    f"inputs: {given}. {filled.readers()} reads the inputs of the projections: pass inputs=x of shape "
                    f"[B, T, embed_dim] = {expected}."
                )
        first = k.size(2) - q.size(2) if start is None else start
        if isinstance(first, Tensor):
            first = first.reshape(1)
        elif first < 0 and filled.reads_positions:
            raise ValueError(
                f"{q.size(2)} queries and {k.size(2)} keys: a part reads positions, and queries have those of the last keys. Pass query_start."
            )
        context = Context(inputs if filled.reads_inputs else None, q, {"key": k, "value": v}, first)
        if not filled.reads_own_value:
            return context
        if isinstance(first, Tensor):
            own = v.index_select(2, context.query_positions().flatten())
        else:
            own = v[:, :, first : first + q.size(2)]
        return context._replace(own_values=own.repeat_interleave(q.size(1) // own.size(1), dim=1))


class PartsOwner(LayerParts, nn.Module):
    """A module whose children are the parts of its attention, and whose states record the choice.

    Attributes:
        core: runs the parts.
        state_config: writes the choice into states, and compares it with that of a loaded one.
    """

    config: AttentionConfig
    core: Core
    state_config: AttentionConfigInStateDict

    def _build_parts(self, query_size: int | None = None) -> None:
        """Build the parts of the configuration. Mixing reads queries of ``query_size``, by default the head size."""
        self._query_size = query_size
        for axis in MODULE_AXES:
            setattr(self, axis, self._build_axis(axis))
        self.core = Core(self.config.spec, self.config)

    def _build_axis(self, axis: str) -> LayerPart | None:
        return self.config.build(axis, self._query_size)

    def _dropout_p(self, dropout: Any) -> float:
        """Return the rate of dropout of this call."""
        return dropout.p if self.training or getattr(dropout, "apply_during_inference", False) else 0.0

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give every parameter its initial value, also after ``to_empty``. A module that is built has them already."""
        with wide_defaults():
            for child in self.children():
                if callable(reset := getattr(child, "reset_parameters", None)):
                    reset()
        for name in self.state_config.markers:
            self.get_buffer(name).zero_()

    def _check_values(self) -> None:
        """Check that a module that was made on the meta device has got values.

        Raises:
            UserError: it has none. Modules whose hooks bring them, such as offloaded ones, are left out.
        """
        for prefix, module in self.named_modules():
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if parameter.is_meta and not module._forward_pre_hooks and not hasattr(module, "_hf_hook"):
                    raise UserError(
                        f"{name} is on the meta device, so it has no values. "
                        "Call to_empty(device=…), and then reset_parameters() or load_state_dict()."
                    )
        self._made_on_meta = False

    # --- state dicts

    def _record_config(
        self, sizes: StateConfig, parts: tuple[Any, ...] = (), without_tensors: tuple[str, ...] = ()
    ) -> None:
        """Let states record the choice: ``sizes``, the axes, and the options of the parts and of ``parts``, which are no modules."""
        config: StateConfig = {
            **sizes,
            **{name: getattr(self.config.spec, name) for name, axis in AXES.items() if axis.is_recorded},
        }
        own: dict[str, LayerPart] = parts_of(self)
        for part in (*parts, *own.values()):
            config |= {option.name: getattr(part, option.name) for option in part.options if not option.choices}
        optional = {axis: part for axis, part in own.items() if part.keeps_stock}
        learned = frozenset(axis for axis, part in optional.items() if [*part.parameters()])
        initial = record_initial_states(optional, self._build_axis)
        without = [*without_tensors, *(axis for axis, part in own.items() if not part.state_dict())]
        self.state_config = AttentionConfigInStateDict(config, initial, learned, without)
        for name in self.state_config.markers:
            self.register_buffer(name, torch.zeros(1))
        self._made_on_meta = any(parameter.is_meta for parameter in self.parameters())

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.state_config.save(destination, prefix)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        self.state_config.prepare(state_dict, prefix, local_metadata, self)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class CoreAttention(PartsOwner):
    """Attention over projected heads: ``core(q, k, v, mask)`` returns the outputs of heads. See :func:`build_core`.

    Args:
        config: the choices and the sizes; ``embed_dim`` is that of ``inputs``.
        dropout: probability of dropping an attention weight in training, or a module with ``p``.
        layout: of q, k, v and the result, one of :data:`LAYOUTS`.

    Raises:
        ValueError: a choice that changes projections, or a backend that cannot compute it.
    """

    dropout_module: Any

    def __init__(self, config: AttentionConfig, *, dropout: float | nn.Module = 0.0, layout: str = "BHTD") -> None:
        super().__init__()
        if reason := refusal(config.spec):
            raise ValueError(f"core attention: {reason}. Use build_attention, the whole layer.")
        if layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r}: expected one of {', '.join(LAYOUTS)}")
        config.check_place()
        self.config, self.layout = config, layout
        self.dropout_module = dropout if isinstance(dropout, nn.Module) else AttentionDropout(dropout)
        check_rate("dropout", self.dropout_module.p)
        self._build_parts()
        names = ("num_heads", "head_dim", "value_dim", "key_value_heads")
        self._record_config({name: getattr(config, name) for name in names})
        if config.backend != "auto":
            check_backend(config.backend, self._smallest_call())

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any = None,
        *,
        inputs: Tensor | None = None,
        mixing_queries: Tensor | None = None,
        query_start: int | Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        score_bias: Tensor | None = None,
        dropout_p: float | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from projected queries to projected keys and values.

        Args:
            q: ``[B, H, T, D]`` queries, normalised and rotated; ``[B, T, H, D]`` with the layout ``BTHD``, and k, v and the result alike.
            k: ``[B, G, S, D]`` keys, cached ones first. G divides H: head i reads group ⌊i·G/H⌋.
            v: ``[B, G, S, Dv]`` values.
            mask: ``"causal"``, ``SlidingWindow(n)``, ``PackedDocuments(…)``, ``Prefix(n)``, any :class:`AttentionMask`, a function
                ``mask_mod(b, h, q, kv)`` or a ``BlockMask`` of FlexAttention, whose q counts from ``query_start``, or a float
                tensor ``[…, T, S]`` that is added. A bool tensor is refused, because libraries read it in two ways: say ``Visible(mask)`` (as
                ``scaled_dot_product_attention``) or ``Hidden(mask)`` (as ``nn.MultiheadAttention``).
            inputs: ``[B, T, embed_dim]``, from which queries were projected; some parts read them, such as gates.
            mixing_queries: like q, the queries before rotary positions, which ``mixhead-b`` reads; by default q. Then M depends on the
                position too, and the layer of :func:`~fairseq_lowrank.attention.build_attention` computes something else.
            query_start: the number of keys before the first query; by default S − T, so that the last query is at the last key. A
                cache of fixed size says it, because its last slots are empty; a tensor ``[1]`` if a compiler shall not see the number.
            scale: of scores, by default 1/√D.
            softcap: c in c·tanh(s / c), applied to scores before they are mixed.
            score_bias: broadcastable to ``[B, H, T, S]``, added to mixed scores.
            dropout_p: of this call, in place of the module's.
            return_weights: return the weights ``[B, H, T, S]`` too, mixed and before dropout.

        Returns:
            ``[B, H, T, Dv]`` in the dtype of v, with ``return_weights`` a pair.

        Raises:
            ValueError: tensors or masks that do not fit.
        """
        if self._made_on_meta and not q.is_meta:
            self._check_values()
        if not q.dtype == k.dtype == v.dtype and not torch.is_autocast_enabled(q.device.type):
            raise ValueError(
                f"q of {q.dtype}, k of {k.dtype} and v of {v.dtype}: expected one dtype. Rotary positions in float32 widen q and k; pass "
                "q.to(v.dtype) and k.to(v.dtype)."
            )
        if self.layout == "BTHD":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            mixing_queries = None if mixing_queries is None else mixing_queries.transpose(1, 2)
        heads, weights = self.core.attend(
            self,
            q,
            k,
            v,
            core_mask(mask),
            self.config.backend,
            inputs=inputs,
            mixing_queries=mixing_queries,
            query_start=query_start,
            scale=scale,
            score_cap=softcap,
            score_bias=score_bias,
            dropout_p=self._dropout_p(self._modules["dropout_module"]) if dropout_p is None else dropout_p,
            need_weights=return_weights,
        )
        if self.layout == "BTHD":
            heads = heads.transpose(1, 2)
        return heads if weights is None else (heads, weights)

    @torch.no_grad()
    def _smallest_call(self) -> AttentionCall:
        """Return the call for one query and one key."""
        config = self.config
        q = torch.empty(1, config.num_heads * config.queries_per_head, 1, config.head_dim)
        k = torch.empty(1, config.num_heads * config.keys_per_head, 1, config.head_dim)
        v = torch.empty(1, config.num_heads, 1, config.value_dim)
        filled = self.core.filled(self)
        call = self.core.call(DotProduct(q, k), v, AttentionMask(), dropout_p=self.dropout_module.p)
        if not filled.steps:
            return call
        context = self.core._context(filled, q, k, v, torch.empty(1, 1, config.embed_dim), None)
        return take_step(filled.steps, "call", call, context)

    def extra_repr(self) -> str:
        config = self.config
        return f"{config.num_heads} heads of {config.head_dim}, layout={self.layout}"


def build_core(
    preset: str,
    num_heads: int,
    head_dim: int,
    *,
    embed_dim: int | None = None,
    self_attention: bool = True,
    layout: str = "BHTD",
    dropout: float | nn.Module = 0.0,
    depth: int = 1,
    device: torch.device | str | int | None = None,
    backend: str = "auto",
    **axes: Value,
) -> CoreAttention:
    """Return the core attention of a method; axes override the choices of the method.

    ::

        core = build_core("mixhead-a", num_heads=8, head_dim=64)
        heads = core(q, k, v, "causal")  # [B, H, T, D], as F.scaled_dot_product_attention(q, k, v, is_causal=True)

    Args:
        preset: a method that keeps the projections, such as ``mixhead-a``, ``mixhead-b``, ``talking-heads``, ``gated`` or ``xsa``.
        num_heads: heads of the output. ``diff`` takes two heads of queries for each.
        embed_dim: size of ``inputs``, which some parts read; by default ``num_heads * head_dim``.
        self_attention: queries and keys have positions in common. False for cross attention.
        device: where the parts are created. They are in float32, also in a half-precision model.
        axes: as in :func:`~fairseq_lowrank.attention.build_attention`, without those of projections.

    Raises:
        ValueError: an unknown or impossible choice. The line names it.
    """
    need = METHODS[preset].needs if preset in METHODS else None
    if axes.get("key_value_heads") is not None or (need is not None and need.axis == "key_value_heads"):
        raise ValueError(
            f"attention {preset!r}: groups of heads need no choice here. Pass k and v with fewer heads to 'mha', or to any other method."
        )
    spec = AttentionSpec.from_preset(preset, head_dim=head_dim, **axes)
    if reason := refusal(spec):
        known = ", ".join(core_presets())
        raise ValueError(
            f"attention {preset!r}: {reason}. Use build_attention({preset!r}, …), the whole layer, or one of {known}."
        )
    with nullcontext() if device is None else torch.device(device):
        config = AttentionConfig(
            spec,
            embed_dim or num_heads * head_dim,
            num_heads,
            self_attention=self_attention,
            depth=depth,
            backend=backend,
        )
        return CoreAttention(config, dropout=dropout, layout=layout)


def takes_projected_heads(axis: str, value: str) -> bool:
    """Return True if a value of an axis needs projected heads alone."""
    part = PARTS[axis][value]
    if part is None or not SLOTS[axis].holds_tensors:
        return True
    return issubclass(part, LayerPart) and part.filled.isdisjoint(BEFORE_HEADS)


def refusal(spec: AttentionSpec) -> str:
    """Return why a choice needs more than projected heads; empty if it does not."""
    for axis, value in spec.choices.items():
        if axis in PARTS and not takes_projected_heads(axis, value):
            part = PARTS[axis][value]
            steps = sorted(part.filled & BEFORE_HEADS) if issubclass(part, LayerPart) else []
            why = (
                "maps queries or keys before they are normalised, rotated and cached"
                if steps
                else "is a choice of projections"
            )
            return f"{axis} {value!r} {why}"
    if spec.key_value_heads is not None:
        return "key_value_heads is read from k and v"
    return ""


def core_presets() -> list[str]:
    """Return the presets that :func:`build_core` builds."""
    names = [name for name, method in METHODS.items() if method.preset and method.needs is None]
    return [name for name in names if not refusal(AttentionSpec.from_preset(name))]


def check_heads(config: AttentionConfig, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that queries, keys and values have the heads for which parts were built.

    Raises:
        ValueError: they have others.
    """
    heads = config.num_heads * config.queries_per_head
    if q.dim() != 4 or q.size(1) != heads:
        shape = list(q.shape)
        raise ValueError(
            f"q of shape {shape} (as [B, H, T, D]): this attention has {heads} heads of queries. Check num_heads, and the layout."
        )
    if config.keys_per_head > 1 and k.size(1) != config.num_heads * config.keys_per_head:
        raise ValueError(
            f"k of {k.size(1)} heads: expected {config.num_heads * config.keys_per_head}, {config.keys_per_head} for each output"
        )
