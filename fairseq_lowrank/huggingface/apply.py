"""Choose the attention of a model in place."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from fairseq_lowrank.attention import AttentionSpec
from fairseq_lowrank.attention.sharding import is_sharded
from fairseq_lowrank.attention.states import without_default_options
from fairseq_lowrank.huggingface.added import added_parameters, choose
from fairseq_lowrank.huggingface.choice import chosen_modules, collection, open_axes, spec_of
from fairseq_lowrank.huggingface.exchange import guard
from fairseq_lowrank.huggingface.function import IMPLEMENTATION
from fairseq_lowrank.huggingface.models import (
    attention_modules,
    calls_the_interface,
    describe,
    head_sizes,
    other_attention,
)
from fairseq_lowrank.huggingface.sites import SITES
from fairseq_lowrank.huggingface.training import TRAIN, freeze
from fairseq_lowrank.messages import UserError, did_you_mean
from fairseq_lowrank.parts import PLAIN


def apply_attention(
    model: PreTrainedModel,
    preset: str,
    *,
    train: str = "all",
    sites: Collection[str] | None = None,
    layers: Collection[int] | None = None,
    **axes: str | None,
) -> PreTrainedModel:
    """Choose the attention of a model in place, and return the model.

    Args:
        model: any model whose attention calls ``ALL_ATTENTION_FUNCTIONS``; see :func:`supported`.
        preset: a method that keeps the projections, such as ``mixhead-a``, ``mixhead-b``, ``gain`` or ``talking-heads``.
        train: ``all`` leaves every parameter trainable; ``mixing`` freezes all but what is added and the head of the task, such as
            a classifier; ``mixing-only`` freezes the head of the task too. A later call trains again what an earlier one froze.
        sites: where to mix: ``encoder`` (bidirectional self-attention), ``decoder`` (causal), ``cross``; by default all.
        layers: the indices of the layers that mix, counted within each site; by default all.
        axes: ``score_mixing``, ``activation``, ``mixing``, ``head_output`` or an option of their parts, such as ``gate_start`` or
            ``factor_rank``; each overrides the method's.

    Mixing is initialised to the identity, so a method with softmax leaves the outputs as they are. What is added is in float32.
    Unless the choice changes nothing, a line on standard error says how many layers are mixed, and what trains.

    Raises:
        UserError: an unknown choice, a method that changes projections, a model without exchangeable attention or with such attention
            in a part of its layers only (``sites`` or ``layers`` asks for this part), or a model that is sharded already.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"model={model!r}: expected a model. Build or load it first, such as with from_pretrained.")
    spec = spec_of(preset, **axes)
    sites = None if sites is None else collection("sites", sites, str, "['encoder']")
    layers = None if layers is None else collection("layers", layers, int, "[0, 1]")
    if train not in TRAIN:
        meanings = ", ".join(f"{value!r} ({meaning})" for value, meaning in TRAIN.items())
        raise UserError(
            f"train={train!r}: expected {meanings}. For an adapter of PEFT, keep 'all' and pass peft_modules(model) to its "
            "configuration."
        )
    if unknown := [site for site in sites or () if site not in SITES]:
        raise UserError(f"sites={unknown[0]!r}: expected {', '.join(SITES)}.{did_you_mean(unknown[0], SITES)}")
    if is_sharded(model):
        raise UserError(
            f"{type(model).__name__} is sharded already. Call apply_attention before fully_shard. "
            "Tensor parallelism (tp_plan) is not computed: load the model without it."
        )
    found, others = attention_modules(model), other_attention(model)
    chosen = chosen_modules(model, found, others, sites, layers)
    for module, site in ((module, site) for module, site, _ in found if module in chosen):
        try:
            replace(head_sizes(module, spec), self_attention=site != "cross").check_place()
        except ValueError as error:
            raise UserError(f"attention {preset!r} in {site} attention: {error}") from error
    for module in model.modules():
        if calls_the_interface(type(module)):
            choose(module, spec if module in chosen else AttentionSpec())
            guard(module, chosen=module in chosen and spec != AttentionSpec())
    freeze(model, train)
    record = {axis: getattr(spec, axis) for axis in open_axes()}
    model.config.lowrank_attention = without_default_options(record) | {"sites": sites, "layers": layers}
    # from_pretrained reads this name: it builds a model that refuses to run without its mixing
    model.config.attn_implementation = IMPLEMENTATION
    model.set_attn_implementation(IMPLEMENTATION)
    left = [module for module, _, _ in found if module not in chosen] + others
    changed = {axis: value for axis, value in record.items() if value != getattr(AttentionSpec(), axis)}
    if changed or train != "all":
        name = preset if preset != PLAIN else ", ".join(f"{axis} {value}" for axis, value in changed.items()) or preset
        print(_summary(name, model, chosen, left), file=sys.stderr)
    return model


def _summary(preset: str, model: nn.Module, chosen: list[nn.Module], left: list[nn.Module]) -> str:
    """Return a line that says which attention layers are mixed, and what trains."""
    mixed = f"{len(chosen)} of {len(chosen) + len(left)} attention layers" + (
        f" (not: {describe(left)})" if left else ""
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    added = {id(parameter) for module in chosen for parameter in added_parameters(module)}
    numbers = sum(parameter.numel() for parameter in trained if id(parameter) in added)
    rest = sum(parameter.numel() for parameter in trained if id(parameter) not in added)
    return f"fairseq-lowrank: {preset} in {mixed}; trains {numbers:,} added numbers and {rest:,} of the model's own"
