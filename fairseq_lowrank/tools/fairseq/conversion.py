"""Conversion of checkpoints to other attention: parts, sizes of heads, numbers of key and value heads, or projections.

Outputs stay the same with two exceptions: fewer key and value heads, which are means of the old ones, and factors of low rank.
"""

from __future__ import annotations

import collections
import math
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_lowrank.attention import AXES, MultiheadAttention
from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.parts import METHODS, MODULE_AXES, PARTS, PLAIN, PRESETS
from fairseq_lowrank.plugin.flags import AttentionOptions, learning_parts
from fairseq_lowrank.progress import tracked
from fairseq_lowrank.tools.axes import axes_of
from fairseq_lowrank.tools.fairseq.architecture import attention_layers, build_model, our_arguments
from fairseq_lowrank.tools.fairseq.checkpoints import log_probabilities, model_arguments, target_of, vocab_size
from fairseq_lowrank.tools.narrowing import LOSS as NARROWED
from fairseq_lowrank.tools.narrowing import Maps, maps_of_weights, narrow
from fairseq_lowrank.tools.rewriting import expanded, full_rank, layer_with, reduced, relative_errors

OF_ALL_AXES = ("attention", "attention_sites", "mixing_lr_scale", "no_attention_bias")
"""The flags of attention that belong to no axis and change in some conversions."""
NOT_EXACT = 1e-9
"""A relative error of outputs in float64 above this is more than rounding."""


def convert(
    state: dict, *, maps: Mapping[str, Maps] | None = None, **flags: int | str | None
) -> tuple[dict, list[str]]:
    """Return a checkpoint with other attention, without the optimizer's state, and notes on what stays the same.

    Args:
        state: see :func:`~fairseq_lowrank.tools.fairseq.checkpoints.load_state`; it is not changed.
        maps: of queries and keys, by the name of the layer, if the new heads are smaller; by default those of the weights alone.
        flags: new values of attention flags by their names in the configuration, such as ``attention`` or ``head_dim``. None
            keeps the old value. What only the old attention needs is dropped.

    Raises:
        UserError: the new attention cannot give the same outputs.
    """
    arch, size = model_arguments(state).arch, vocab_size(state)
    old, new = (our_arguments(model_arguments(state)) for _ in range(2))
    if old is None or new is None:
        raise FlagError(
            "--arch",
            arch,
            "its attention cannot be chosen",
            "Choose one that fairseq-lowrank params --list fairseq shows.",
        )
    if size is None:
        raise UserError(
            f"the checkpoint of {arch} has no word embeddings of one encoder or decoder. Use a translation or language model."
        )
    given = {name: value for name, value in flags.items() if value is not None}
    old_layers = {layer.name: layer for layer in attention_layers(build_model(old, size))}
    given |= kept_values(given, [layer.module for layer in old_layers.values()])
    set_flags(new, given)
    before, after = AttentionOptions.from_args(old), AttentionOptions.from_args(new)

    def loaded(name: str) -> tuple[MultiheadAttention, MultiheadAttention]:
        """Return an old layer, and what the new one is made of. One layer at a time is in memory."""
        original = layer_with(old_layers[name].module, tensors_of(state["model"], name))
        return original, _named(name, reduced, original, after.spec_at(old_layers[name].site))

    if before.spec.projection != after.spec.projection:
        bases = {name: loaded(name)[1].to("meta") for name in old_layers}
        chosen = [base for name, base in bases.items() if old_layers[name].site in after.sites]
        set_sizes(new, given, chosen, after.spec.projection)
        if any(base.config.bias for base in bases.values()):
            new.no_attention_bias = False
    model = build_model(new, size)
    layers, tensors = attention_layers(model), dict(state["model"])
    if all(_is_same(layer.module, old_layers[layer.name].module) for layer in layers):
        raise FlagError("--attention", new.attention, "the checkpoint already has this attention", "Give another.")
    changes = []
    for name, _, _, module in layers:
        original, base = loaded(name)
        narrower = "head_dim" in given and module.head_dim < base.head_dim
        if narrower:
            chosen = _named(name, maps_of_weights, base, module.head_dim) if maps is None else maps[name]
            base = _named(name, narrow, base, chosen)
        result, loss = _named(name, expanded, base, module)
        loss = loss or NARROWED * narrower
        written = _named(name, rounded, result, module, tensors[f"{name}.out_proj.weight"].dtype)
        changes.append(compared(name, original, result, loss))
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(f"{name}.")}
        tensors |= {f"{name}.{key}": tensor for key, tensor in written.items()}
    converted = with_model(state, new, as_state_of(model, tensors, state["model"]))
    return converted, [*notes(changes), *dropped_parts(state)]


def set_flags(args: Namespace, given: dict[str, Any]) -> None:
    """Set new flags in a model's arguments, and drop what belongs to the old attention alone."""
    old = getattr(args, "attention", None) or PLAIN
    parts = _chosen_parts(args)
    if "attention" in given:  # a new preset, without the parts that were chosen in addition to the old one
        for axis in MODULE_AXES:
            setattr(args, AXES[axis].flag, None)
        if given["attention"] != old and (need := METHODS[old].needs) is not None:
            setattr(args, AXES[need.axis].flag, None)
    for name, value in given.items():
        setattr(args, name, value)
    kept = parts & _chosen_parts(args)
    for axis in AXES.values():
        dropped = axis.flag not in given and axis.readers and kept.isdisjoint(axis.readers)
        if dropped and getattr(args, axis.flag, None) is not None:
            setattr(args, axis.flag, False if axis.type is bool else None)
    rate, args.mixing_lr_scale = getattr(args, "mixing_lr_scale", None), None
    if learning_parts(AttentionOptions.from_args(args).spec):
        args.mixing_lr_scale = rate


def kept_values(given: Mapping[str, Any], layers: Collection[MultiheadAttention]) -> dict[str, int]:
    """Return the flag that keeps the size of values if the new head size is smaller than that of the old layers.

    Raises:
        UserError: layers have different sizes of values, and there is one flag.
    """
    head_dim = given.get("head_dim")
    if head_dim is None or "value_dim" in given or all(layer.head_dim <= head_dim for layer in layers):
        return {}
    sizes = {layer.config.value_dim for layer in layers}
    if len(sizes) > 1:
        reason = f"layers have values of different sizes {sorted(sizes)}"
        raise FlagError("--head-dim", head_dim, reason, "Keep the head size.")
    return {"value_dim": sizes.pop()}


def _chosen_parts(args: Namespace) -> set[tuple[str, str]]:
    """Return the axes and the names of the chosen parts."""
    preset = PRESETS[getattr(args, "attention", None) or PLAIN]
    return {
        (axis, getattr(args, AXES[axis].flag, None) or preset.get(axis) or str(AXES[axis].default)) for axis in PARTS
    }


def set_sizes(args: Namespace, given: Collection[str], layers: Collection[MultiheadAttention], projection: str) -> None:
    """Set the flags of sizes, unless they are given, so that nothing of the layers is lost.

    Args:
        args: the new arguments.
        given: the names of the flags that are given.
        layers: plain layers with the outputs of the old ones, at the chosen sites.
        projection: of the new layers.

    Raises:
        UserError: layers need different head sizes, and there is one flag.
    """
    sizes = {(layer.head_dim, layer.config.value_dim) for layer in layers}
    usual = all(layer.head_dim * layer.num_heads == layer.embed_dim for layer in layers)
    if len(sizes) > 1 and not usual:
        raise UserError(f"--head-dim: layers need different sizes {sorted(sizes)}. Keep the checkpoint as it is.")
    head_dim, value_dim = next(iter(sizes))
    wanted = {
        "head_dim": None if usual else head_dim,
        "value_dim": None if value_dim == head_dim else value_dim,
    }
    factor = PARTS["projection"][projection].factor
    if factor is not None:
        wanted[AXES[factor].flag] = max(full_rank(layer, projection) for layer in layers)
    for name, value in wanted.items():
        if name not in given:
            setattr(args, name, value)


def tensors_of(state: dict[str, Tensor], layer: str) -> dict[str, Tensor]:
    """Return the tensors of a layer by their names in the layer."""
    return {name.removeprefix(f"{layer}."): t for name, t in state.items() if name.startswith(f"{layer}.")}


def _is_same(module: MultiheadAttention, original: MultiheadAttention) -> bool:
    same_biases = module.config.bias == original.config.bias
    return same_biases and module.spec == original.spec and axes_of(module) == axes_of(original)


def rounded(layer: MultiheadAttention, like: MultiheadAttention, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a layer in a dtype, with the names of those of ``like``, which has the same choices.

    Raises:
        UserError: a number is not finite in the dtype, or the new layer has other outputs.
    """
    found, result = layer.state_dict(), {}
    for name, wanted in like.state_dict().items():
        # a bias that the layer lacks and the new one needs is 0
        result[name] = found.get(name, torch.zeros(wanted.shape)).to(dtype)
        if not result[name].isfinite().all():
            raise UserError(
                f"{name} has an infinity or NaN in {dtype}. Give a checkpoint in float32 that did not diverge."
            )
    check_error(relative_errors(layer, layer_with(like, result))[0], 1e3 * torch.finfo(dtype).eps)
    return result


def check_error(error: float, largest: float) -> None:
    """Check that rounding can cause a relative error of outputs.

    Raises:
        UserError: it cannot.
    """
    if not error <= largest:
        raise UserError(
            f"the converted layer has other outputs (relative error {error:.2g}), so this conversion is not known for the "
            "checkpoint's attention. Keep the checkpoint as it is."
        )


class Change(NamedTuple):
    """What a conversion changes in a layer, on random inputs.

    Args:
        name: of the layer.
        error: the relative error of its outputs.
        weight_error: the relative error of its attention weights.
        loss: why outputs differ; empty if they do not.
        rounds: tensors of the old layer have other values in the new one.
    """

    name: str
    error: float
    weight_error: float
    loss: str
    rounds: bool


def compared(name: str, before: MultiheadAttention, after: MultiheadAttention, loss: str) -> Change:
    """Compare a layer in float64 before and after.

    Raises:
        UserError: the outputs differ, and ``loss`` does not say why.
    """
    error, weight_error = relative_errors(before, after)
    if not (loss and math.isfinite(error)):
        _named(name, check_error, error, NOT_EXACT)
    old, new = before.state_dict(), after.state_dict()
    kept = all(torch.equal(old[key], new[key]) for key in old.keys() & new.keys())
    rounds = not kept or before.spec.projection != after.spec.projection
    return Change(name, error, weight_error, loss, rounds)


def notes(changes: Collection[Change]) -> list[str]:
    """Return notes on what stays the same, and what does not."""
    worst = max(changes, key=lambda change: change.error)
    mean = sum(change.error for change in changes) / len(changes)
    if worst.error > NOT_EXACT:
        return [
            f"not exact: {worst.loss}. The relative error of layers' outputs on random inputs is {mean:.2g} on average, "
            f"and {worst.error:.2g} in {worst.name}. Train further, or measure the error with --data DIR."
        ]
    exact = "exact up to rounding" if any(change.rounds for change in changes) else "exact"
    if all(change.weight_error <= NOT_EXACT for change in changes):
        return [f"{exact}: the model's outputs and the returned attention weights"]
    return [
        f"{exact}: the model's outputs",
        "not the same: the returned attention weights, and their dropout in further training",
    ]


def _named(name: str, function: Callable, *args):
    """Call a function, and add the layer's name to its errors."""
    try:
        return function(*args)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error


def output_error(first, second, samples: list[dict], pad: int) -> dict[str, float]:
    """Compare the outputs of two models on samples, whose targets are padded with `pad`.

    Returns:
        `bits_before` and `bits_after`: the mean loss of a target token in bits. `mean`: the mean absolute difference of the
        target tokens' log₂ probabilities. `largest`: the largest difference over the entire vocabulary.
    """
    totals, largest = torch.zeros(4, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for sample in tracked(samples, "comparing outputs", "sequences"):
        with torch.no_grad():
            before, after = (log_probabilities(model, sample).double() / math.log(2) for model in (first, second))
        largest = torch.maximum(largest, (after - before).abs().max())
        target = sample[target_of(sample)].view(before.shape[:-1])
        said = target != pad
        old, new = (each.gather(-1, target[..., None])[..., 0][said] for each in (before, after))
        totals += torch.stack((-old.sum(), -new.sum(), (new - old).abs().sum(), said.sum().double()))
    bits_before, bits_after, mean = (totals[:3] / totals[3]).tolist()
    return {"bits_before": bits_before, "bits_after": bits_after, "mean": mean, "largest": largest.item()}


def as_state_of(model: torch.nn.Module, tensors: dict[str, Tensor], old: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in the model's order, with the metadata of its layers.

    Raises:
        UserError: a tensor of the model is missing.
    """
    fresh = model.state_dict()
    markers = [
        f"{layer.name}.{marker}" for layer in attention_layers(model) for marker in layer.module.state_config.markers
    ]
    tensors = {name: fresh[name] for name in markers} | tensors  # older checkpoints have none
    order = {name: index for index, name in enumerate(fresh)}
    if missing := [name for name in fresh if "_attn." in name and name not in tensors]:
        raise UserError(f"the checkpoint has no {missing[0]}. Use a complete checkpoint.")
    state = collections.OrderedDict(sorted(tensors.items(), key=lambda item: order.get(item[0], len(order))))
    attention = tuple(layer.name for layer in attention_layers(model))
    saved = getattr(old, "_metadata", {})
    state._metadata = collections.OrderedDict(
        (name, metadata if name.startswith(attention) else saved.get(name, metadata))
        for name, metadata in fresh._metadata.items()
    )
    return state


AVERAGES = frozenset(("ema", "ema_fp32_params"))
"""The entries of a checkpoint that hold averages of weights (``--store-ema``)."""


def with_model(state: dict, args: Namespace, model: dict[str, Tensor]) -> dict:
    """Return the checkpoint with another model and its arguments, without the old optimizer and averaged weights."""
    from omegaconf import OmegaConf

    old = model_arguments(state)
    names = (*OF_ALL_AXES, *(axis.flag for axis in AXES.values()))
    changes = {name: value for name in names if (value := getattr(args, name, None)) != getattr(old, name, None)}
    cfg = state["cfg"]
    cfg = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True) if OmegaConf.is_config(cfg) else dict(cfg)
    kind = Namespace if isinstance(cfg["model"], Namespace) else dict
    model_cfg = dict(vars(cfg["model"]) if kind is Namespace else cfg["model"])
    named = {}
    if args.arch != old.arch:  # a stock model became ours; arch or _name has its name
        named = {name: args.arch for name in ("arch", "_name") if name in model_cfg}
    cfg["model"] = kind(**model_cfg | changes | named)
    state = {name: value for name, value in state.items() if name != "last_optimizer_state"}
    extra = {name: value for name, value in (state.get("extra_state") or {}).items() if name not in AVERAGES}
    return state | {"args": None, "cfg": cfg, "model": model, "extra_state": extra}


def dropped_parts(state: dict) -> list[str]:
    """Return a note on the parts of a checkpoint that belong to the old model and are left out."""
    dropped = ["the optimizer's state"] * ("last_optimizer_state" in state)
    dropped += ["averaged weights (EMA)"] * (not AVERAGES.isdisjoint(state.get("extra_state") or {}))
    if not dropped:
        return []
    return [f"left out: {' and '.join(dropped)}. Train further with --finetune-from-model or --reset-optimizer."]
