"""Choose the attention of a model in place."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from fairseq_lowrank.attention import AttentionSpec
from fairseq_lowrank.attention.sharding import is_sharded
from fairseq_lowrank.attention.states import without_default_options
from fairseq_lowrank.huggingface.added import (
    SLOT,
    AddedAttention,
    add,
    added_parameters,
    added_to,
    build_added,
    part_tensors,
    parts_of,
)
from fairseq_lowrank.huggingface.choice import chosen_axes, chosen_modules, collection, open_axes, spec_of
from fairseq_lowrank.huggingface.exchange import guard
from fairseq_lowrank.huggingface.function import IMPLEMENTATION
from fairseq_lowrank.huggingface.models import (
    adds_masks,
    attention_modules,
    calls_the_interface,
    can_exchange_attention,
    causal_by_site,
    describe,
    head_sizes,
    model_of_transformers,
    other_attention,
)
from fairseq_lowrank.huggingface.recorded import recorded_attention
from fairseq_lowrank.huggingface.rotation import check_mixing_queries, rotates
from fairseq_lowrank.huggingface.sites import SITES, has_sinks_already
from fairseq_lowrank.huggingface.training import TRAIN, freeze
from fairseq_lowrank.messages import UserError, did_you_mean
from fairseq_lowrank.parts import PLAIN, LayerPart
from fairseq_lowrank.parts.stages import declared


def apply_attention(
    model: PreTrainedModel,
    preset: str,
    *,
    train: str = "all",
    sites: Collection[str] | None = None,
    layers: Collection[int] | None = None,
    mixing_queries: str = "unrotated",
    reset: bool = False,
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
        mixing_queries: which queries ``mixhead-b`` and its kin read in models with rotary positions: ``unrotated``, as in
            :func:`~fairseq_lowrank.attention.build_attention`, or ``rotated``, so that M depends on absolute positions, as in 0.2.0.
        reset: drop trained attention that the model or its folder has. Without it, the same choice keeps what is trained, and another
            choice is refused.
        axes: ``score_mixing``, ``activation``, ``mixing``, ``head_output`` or an option of their parts, such as ``gate_start`` or
            ``factor_rank``; each overrides the method's.

    Mixing is initialised to the identity, so a method with softmax leaves the outputs as they are. What is added is in float32.
    Unless the choice changes nothing, a line on standard error says how many layers are mixed, and what trains.

    Raises:
        UserError: an unknown choice, a method that changes projections, a model without exchangeable attention or with such attention
            in a part of its layers only (``sites`` or ``layers`` asks for this part), a model that is wrapped or sharded already, or
            trained attention that would be lost. The model stays as it was.
    """
    plan = planned(model, preset, train=train, sites=sites, layers=layers, mixing_queries=mixing_queries, **axes)
    carry_out(plan if reset else _keeping(plan))
    return model


class Plan(NamedTuple):
    """What :func:`apply_attention` is going to do. Until it is carried out, the model is as it was.

    Args:
        model: of transformers.
        name: of the choice, for the summary.
        train: what will be trainable.
        record: what the configuration of the model records, or ``None`` for plain attention.
        added: by attention module, what it gets.
        chosen, left: the modules with the chosen attention, and without it.
    """

    model: PreTrainedModel
    name: str
    train: str
    record: dict[str, Any] | None
    added: dict[nn.Module, tuple[AddedAttention, dict[str, LayerPart]]]
    chosen: list[nn.Module]
    left: list[nn.Module]

    def tensors(self) -> dict[str, Tensor]:
        """Return what :func:`~.added.mixing_state` will return."""
        return {
            f"{name}.{key}": tensor
            for name, module in self.model.named_modules()
            if module in self.added
            for key, tensor in part_tensors(self.added[module][1]).items()
        }


def planned(
    model: nn.Module,
    preset: str,
    *,
    train: str = "all",
    sites: Collection[str] | None = None,
    layers: Collection[int] | None = None,
    mixing_queries: str = "unrotated",
    **axes: str | None,
) -> Plan:
    """Check the arguments of :func:`apply_attention`, and build what it adds.

    Raises:
        UserError: as :func:`apply_attention` does.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"model={model!r}: expected a model. Build or load it first, such as with from_pretrained.")
    model = model_of_transformers(model)
    spec = spec_of(preset, **axes)
    check_mixing_queries(mixing_queries)
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
    _check_places(preset, spec, [(module, site) for module, site, _ in found if module in chosen])
    _check_exchange(model)
    causal = causal_by_site(model)
    added = {
        module: build_added(module, spec if module in chosen else AttentionSpec(), causal.get(module), mixing_queries)
        for module in model.modules()
        if calls_the_interface(type(module))
    }
    choice = {axis: getattr(spec, axis) for axis in open_axes()}
    changed = {axis: value for axis, value in choice.items() if value != getattr(AttentionSpec(), axis)}
    record = without_default_options(choice) | {"sites": sites, "layers": layers} if changed else None
    reads = any(part.reads_queries and rotates(type(module)) for module in chosen for part in added[module][1].values())
    if record is not None and reads:
        record["mixing_queries"] = mixing_queries
    name = preset if preset != PLAIN else ", ".join(f"{axis} {value}" for axis, value in changed.items())
    left = [module for module, _, _ in found if module not in chosen] + others
    return Plan(model, name or preset, train, record, added, chosen, left)


def _check_places(preset: str, spec: AttentionSpec, places: list[tuple[nn.Module, str]]) -> None:
    """Refuse a choice that does not work in one of the chosen modules, each with its site."""
    for module, site in places:
        try:
            replace(head_sizes(module, spec), self_attention=site != "cross").check_place()
        except ValueError as error:
            raise UserError(f"attention {preset!r} in {site} attention: {error}") from error
        if has_sinks_already(module, spec):
            raise UserError(
                f"attention {preset!r} in {site} attention: {type(module).__name__} has sinks already. Choose other attention, or leave "
                "these layers out with layers= or sites=."
            )


def _check_exchange(model: PreTrainedModel) -> None:
    """Refuse a model whose attention function transformers would not exchange."""
    inner = [one for one in model.modules() if isinstance(one, PreTrainedModel)]
    if any(getattr(one.config, "output_attentions", False) for one in inner):
        raise UserError(
            "config.output_attentions=True: transformers returns and saves it with its eager attention alone. Set it to False, and pass "
            "output_attentions=True to each call that needs weights."
        )
    if not can_exchange_attention(type(model)):
        remedy = "Use a model for which supported(model_class) is true."
        if not type(model).__module__.startswith("transformers."):
            remedy = "Put the class into a module, not into a notebook."
        raise UserError(
            f"{type(model).__name__}: transformers does not exchange its attention function, since it does not find one in the "
            f"source of the class. {remedy}"
        )


def _keeping(plan: Plan) -> Plan:
    """Return a plan that keeps trained attention of the same choice. To choose plain attention is to remove what there is.

    Raises:
        UserError: the model or its folder has trained attention of another choice.
    """
    model, record = plan.model, plan.record
    before = {module: parts_of(module) for module in model.modules() if SLOT in vars(module)}
    folder, recorded = getattr(model.config, "name_or_path", ""), getattr(model.config, SLOT, None)
    if record is None:
        return plan
    if not before and folder and (recorded or (Path(folder).is_dir() and recorded_attention(Path(folder)))):
        raise UserError(
            f"{folder} has trained attention, which the model does not have. Call load_attention(model, {folder!r}), or pass reset=True "
            "to start from the identity."
        )
    if not any(_is_trained(module, parts) for module, parts in before.items()):
        return plan
    if (
        recorded is None
        or chosen_axes(recorded) != chosen_axes(record)
        or any(before.get(module, {}).keys() != parts.keys() for module, (_, parts) in plan.added.items())
    ):
        raise UserError(
            f"{type(model).__name__} has trained attention of another choice, which would be lost. Pass reset=True to replace it."
        )
    return plan._replace(added={module: (added, before[module]) for module, (added, _) in plan.added.items()})


def _is_trained(module: nn.Module, parts: Mapping[str, Any]) -> bool:
    """Return True if a part that learns has other values than those it began with."""
    added = added_to(module)
    tensors = part_tensors({axis: part for axis, part in parts.items() if declared(part).learns})
    if added.config is None or not tensors:
        return False
    built = {axis: part for axis in parts if (part := added.config.build(axis)) is not None}
    start = part_tensors(built)
    for name, tensor in tensors.items():
        if tensor.is_meta:  # offloaded, or without values
            if any(hasattr(child, "_hf_hook") for part in parts.values() for child in part.modules()):
                return True
        elif name not in start or not torch.equal(tensor.detach().cpu(), start[name].to(tensor.dtype)):
            return True
    return False


def carry_out(plan: Plan) -> None:
    """Change the model as planned, and print the summary."""
    model, record = plan.model, plan.record
    recorded = getattr(model.config, "lowrank_attention", None)
    if recorded is not None and not any(SLOT in vars(module) for module in model.modules()):
        _separate_config(model)
    for module, (added, parts) in plan.added.items():
        add(module, added, parts, chosen=module in plan.chosen and record is not None)
        guard(module, chosen=module in plan.chosen and record is not None)
    freeze(model, plan.train)
    if record is None:  # so that from_pretrained reads a saved model as any other
        for name in ("lowrank_attention", "attn_implementation"):
            vars(model.config).pop(name, None)
    else:
        model.config.lowrank_attention = record
        # from_pretrained reads this name: it builds a model that refuses to run without its mixing
        model.config.attn_implementation = IMPLEMENTATION
    _use_function(model)
    if record is not None or plan.train != "all":
        print(_summary(plan.name, model, plan.chosen, plan.left), file=sys.stderr)


def add_plain_attention(model: PreTrainedModel) -> None:
    """Add plain attention to the modules without a choice, so that :func:`~.function.attention_calls` receives their calls.

    Chosen attention stays. A model that records a choice stays as it is: without its mixing, its first call raises an error.
    """
    if getattr(model.config, SLOT, None) is not None:
        return
    causal = causal_by_site(model)
    for module in model.modules():
        if calls_the_interface(type(module)) and SLOT not in vars(module):
            add(module, *build_added(module, AttentionSpec(), causal.get(module)))
    _use_function(model)


def _use_function(model: PreTrainedModel) -> None:
    """Make the modules of a model call our function."""
    model.set_attn_implementation(IMPLEMENTATION)
    configs: dict[nn.Module, PretrainedConfig] = {}
    for outer in model.modules():  # a model within another one comes later
        if isinstance(outer, PreTrainedModel):
            adds_masks(type(outer.config))  # a compiler cannot trace the search
            configs |= dict.fromkeys(outer.modules(), outer.config)
    # an EncoderDecoderModel of two models copies their configurations, and their modules keep the old ones
    for module, config in configs.items():
        own = getattr(module, "config", None)
        if SLOT in vars(module) and type(own) is type(config) and own._attn_implementation != IMPLEMENTATION:
            module.config = config


def _separate_config(model: PreTrainedModel) -> None:
    """Give a model a copy of its configuration object, because another model may have the same one, and change it later."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PretrainedConfig) and id(value) in copies:
                vars(module)[name] = copies[id(value)]


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
