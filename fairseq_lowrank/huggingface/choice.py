"""Which attention a model can get, in which of its layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fairseq_lowrank.attention import AttentionSpec
from fairseq_lowrank.attention.core import takes_projected_heads
from fairseq_lowrank.huggingface.models import describe
from fairseq_lowrank.huggingface.sites import SITES
from fairseq_lowrank.messages import IMPORT_PLUGIN, UserError, did_you_mean
from fairseq_lowrank.parts import AXES, METHODS, PARTS, PRESETS

_ARGUMENTS = ("train", "sites", "layers", "mixing_queries", "reset")
"""The other arguments of ``apply_attention``, which a misspelled axis may mean."""


def open_axes() -> list[str]:
    """Return the axes that a model of transformers leaves open, and the options of the parts on them."""
    values = {axis: [value for value, part in PARTS[axis].items() if part is not None] for axis in PARTS}
    axes = [axis for axis in PARTS if any(takes_projected_heads(axis, value) for value in values[axis])]
    return [
        *axes,
        *(name for name, axis in AXES.items() if any(takes_projected_heads(*reader) for reader in axis.readers)),
    ]


def chosen_axes(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recorded choice, with defaults for options that are newer than the record."""
    queries = {"mixing_queries": record.get("mixing_queries", "rotated")}
    return queries | {name: record.get(name, AXES[name].default) for name in open_axes()}


def usable_presets() -> list[str]:
    """Return the presets that a model of transformers can take."""
    names = (name for name in PRESETS if METHODS[name].needs is None)
    return [name for name in names if not _refusal(AttentionSpec.from_preset(name))]


def spec_of(preset: str, **axes: str | None) -> AttentionSpec:
    """Return the choice of a preset, with ``axes`` over it, if a model of transformers can take it.

    Raises:
        UserError: the preset or an axis changes projections or scores, which are the model's own.
    """
    usable, free = usable_presets(), open_axes()
    if unknown := [name for name in axes if name not in AXES]:
        near = did_you_mean(unknown[0], [*free, *_ARGUMENTS])
        raise UserError(
            f"{unknown[0]}={axes[unknown[0]]!r}: {unknown[0]} is not an axis of attention. Set {', '.join(free)}, or remove it.{near}"
        )
    if preset not in PRESETS:
        raise UserError(
            f"attention method {preset!r}: expected one of {', '.join(usable)}.{did_you_mean(preset, usable)} {IMPORT_PLUGIN}"
        )
    need = METHODS[preset].needs
    if need is not None and need.axis not in free:
        reason = f"needs {need.what}, which the projections of the model fix"
    elif closed := [name for name, value in axes.items() if value is not None and name not in free]:
        raise UserError(
            f"{closed[0]}={axes[closed[0]]!r}: {closed[0]} is fixed by the projections of the model. Set {', '.join(free)}, or remove it."
        )
    else:
        spec = AttentionSpec.from_preset(preset, **axes)
        if not (reason := _refusal(spec)):
            return spec
    raise UserError(f"attention {preset!r} {reason}. Choose from {', '.join(usable)}, or set {', '.join(free)}.")


def _refusal(spec: AttentionSpec) -> str:
    """Return why a model of transformers cannot take a choice; empty if it can."""
    if spec.queries_per_head > 1:
        return "has two heads of queries for each output, which the projections of the model do not have"
    free = open_axes()
    closed = [
        name
        for name, value in spec.choices.items()
        if name not in free or (name in PARTS and not takes_projected_heads(name, value))
    ]
    return f"sets {', '.join(closed)}, which the projections of the model fix" if closed else ""


def collection(name: str, values: object, kind: type, example: str) -> list:
    """Return the values of an argument as a list.

    Raises:
        UserError: it is no collection, or holds values of another type.
    """
    if (
        isinstance(values, str)
        or not isinstance(values, Collection)
        or not all(type(value) is kind for value in values)
    ):
        raise UserError(f"{name}={values!r}: expected a list such as {example}")
    return list(values)


def chosen_modules(
    model: PreTrainedModel,
    found: list[tuple[nn.Module, str, int]],
    others: list[nn.Module],
    sites: list[str] | None,
    layers: list[int] | None,
) -> list[nn.Module]:
    """Return the modules that a choice of sites and layers means.

    Raises:
        UserError: there are none, a layer does not exist, or only a part of the model can be mixed and nothing asks for a part.
    """
    name = type(model).__name__
    if not found:
        raise UserError(
            f"{name} computes its attention itself, so it cannot be chosen. "
            "Use a model for which supported(model_class) is true."
        )
    if others and sites is None and layers is None:
        there = [site for site in SITES if any(site == known for _, known, _ in found)]
        raise UserError(
            f"{name}: attention can be chosen in {len(found)} of {len(found) + len(others)} layers, and not in "
            f"{describe(others)}. Choose this part with sites={there}, or with layers=."
        )
    here = [(module, index) for module, site, index in found if sites is None or site in sites]
    counts = {site: sum(site == known for _, known, _ in found) for site in SITES}
    if not here:
        known = [site for site, count in counts.items() if count]
        raise UserError(f"sites={sites}: {name} has attention at {known}. Use sites={known}, or None for all.")
    if absent := [layer for layer in layers or () if layer not in {index for _, index in here}]:
        has = " and ".join(f"{count} attention layers at {site!r}" for site, count in counts.items() if count)
        raise UserError(
            f"layers={layers}: there is no layer {absent[0]}. {name} has {has}. Count layers from 0, within each site."
        )
    if layers is not None and not layers:
        raise UserError("layers=[]: expected at least one layer, or None for all")
    return [module for module, index in here if layers is None or index in layers]
