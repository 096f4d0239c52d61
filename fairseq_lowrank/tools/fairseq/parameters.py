"""Numbers of parameters of each attention method, counted on built models."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from copy import copy
from typing import Any

import torch
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from torch import nn

from fairseq_lowrank.attention import AXES, PRESETS, AttentionSpec
from fairseq_lowrank.messages import FlagError
from fairseq_lowrank.parts import METHODS, MODULE_AXES, PLAIN
from fairseq_lowrank.plugin.architectures import LARGE, default_arguments, on_meta
from fairseq_lowrank.progress import Progress
from fairseq_lowrank.tasks.span_head import add_span_head
from fairseq_lowrank.tools.axes import axes_of
from fairseq_lowrank.tools.fairseq.architecture import (
    attention_layers,
    build_model,
    chooses_attention,
    parse_architecture,
    stacks,
)
from fairseq_lowrank.tools.fairseq.checkpoints import model_arguments, vocab_sizes
from fairseq_lowrank.tools.fairseq.sizes import compare_sizes

SWEEPS = {
    "heads": (2, 4, 8, 12, 16, 24, 32),
    "layers": (2, 4, 6, 8, 12, 16, 24),
    "head-dim": (16, 32, 64, 128, 256, 512),
}


def count(model: nn.Module) -> dict:
    """Count the parameters of a model by their purpose; shared parameters count once.

    Returns:
        - `total`, and its parts `attention` (output projection and biases included), `feed_forward`, `embeddings` and `other`
          (such as layer norms). Embeddings are those of words and positions, projections between them and the model's width, and
          the output matrix or adaptive softmax.
        - `sites`: attention at each site.
        - `attention_without_biases`: the number that the MHE poster counts and PEoP uses.
        - `unused`: parameters that nothing reads (``--unused-key-projection``).
    """
    kinds: dict[nn.Parameter, str] = {}
    sites: dict[str, int] = {}
    biases = unused = 0
    for layer in attention_layers(model):
        for name, parameter in layer.module.named_parameters():
            kinds.setdefault(parameter, "attention")
            sites[layer.site] = sites.get(layer.site, 0) + parameter.numel()
            # u and v of relative positions are not biases of projections
            of_projection = name.endswith(("proj.bias", "synthesizer.bias")) or name in ("bias_k", "bias_v")
            biases += parameter.numel() * of_projection
        for name in getattr(getattr(layer.module, "score", None), "unused_modules", ()):
            unused += sum(parameter.numel() for parameter in getattr(layer.module, name).parameters())
    for name, module in model.named_modules():
        kind = ""
        if isinstance(module, (nn.Embedding, AdaptiveInput, AdaptiveSoftmax)) or name.endswith("output_projection"):
            kind = "embeddings"
        elif name.rpartition(".")[2] in ("fc1", "fc2"):
            kind = "feed_forward"
        for parameter in module.parameters() if kind else ():
            kinds.setdefault(parameter, kind)
    for name, parameter in model.named_parameters():
        if EMBEDDING_PARAMETERS.search(name):
            kinds.setdefault(parameter, "embeddings")
    parts = dict.fromkeys(("attention", "feed_forward", "embeddings", "other"), 0)
    for parameter in model.parameters():
        parts[kinds.get(parameter, "other")] += parameter.numel()
    return {
        "total": sum(parts.values()),
        **parts,
        "attention_without_biases": parts["attention"] - biases,
        "unused": unused,
        "sites": sites,
    }


EMBEDDING_PARAMETERS = re.compile(r"(^|\.)(lm_head\.(weight|bias)|project_(in|out)_dim\..*)$")
"""Parameters of word embeddings and of the output matrix, in addition to those of known modules."""


def _of_architecture(name: str) -> bool:
    """Return True if an axis belongs to an architecture, not to its attention: a Synthesizer keeps its scores with any preset."""
    return name == "score" or any(axis == "score" for axis, _ in AXES[name].readers)


def plain(args: Namespace) -> Namespace:
    """Return the arguments with plain attention. The head size is kept, unless it is all that the preset changes."""
    method = METHODS.get(getattr(args, "attention", None) or PLAIN)
    size = method.needs.axis if method and method.needs and not method.axes else None
    keep = {"head_dim"} - {size}
    return with_preset(args, PLAIN, keep=keep)


def with_preset(args: Namespace, preset: str, keep: Collection[str]) -> Namespace:
    """Return the arguments with a preset, the axes in `keep`, and the axes that belong to the architecture."""
    args, own = copy(args), default_arguments(args.arch)
    args.attention = preset
    parts = METHODS[preset].parts if preset in METHODS else {}
    if (
        any(part.needs_self_attention() for axis, part in parts.items() if axis in MODULE_AXES)
        and len(list(stacks(args))) > 1
    ):
        args.attention_sites = "encoder,decoder"
    for name, axis in AXES.items():
        if name not in keep:
            setattr(args, axis.flag, getattr(own, axis.flag, None) if _of_architecture(name) else None)
    return args


def class_of(layer: Any, preset: str) -> str | None:
    """Return the class of a layer compared with plain attention of its width and heads, if it is known.

    Args:
        layer: one of this package's layers, or fairseq's own.
        preset: the value of `--attention`, to tell presets apart that differ in sizes only.
    """
    spec = getattr(layer, "spec", AttentionSpec())
    names = [name for name, axis in AXES.items() if axis.choices is not None and not axis.readers]

    def matches(known: str) -> bool:
        axes: dict[str, Any] = dict(PRESETS[known])
        plain = AttentionSpec(**axes)
        return all(getattr(spec, name) == getattr(plain, name) for name in names)

    found = next((known for known in (preset, *PRESETS) if matches(known)), None)
    if found is None:
        return None
    method = METHODS[found]
    if method.kind_of is None or not hasattr(layer, "projection"):
        return method.kind
    return method.kind_of(layer)


def describe(architecture: str, vocab_size: int, flags: Sequence[str] = (), *, task: str | None = None) -> dict:
    """Return the counts of an architecture, and `axes`, the choices and the class of the first attention layer of each site.

    `extra` is the difference between its total and that of the same model with plain attention. It is 0 for fairseq's own
    attention, and None if plain attention does not work with the sizes.
    """
    args = parse_architecture(architecture, flags, task=task)
    about = {"architecture": architecture, "vocab_size": vocab_size, "flags": list(flags)}
    return about | _describe(args, lambda args: build_model(args, vocab_size))


def describe_state(state: dict) -> dict:
    """Return the same as :func:`describe` for the model of a checkpoint, with ``target_vocab_size`` if it has two vocabularies."""
    args, sizes = model_arguments(state), vocab_sizes(state)
    if not sizes:
        remedy = "Give a checkpoint of a model of text."
        reason = "this architecture has no word embeddings of one encoder or decoder"
        raise FlagError("--checkpoint", args.arch, reason, remedy)
    vocab_size, *others = sizes.values()
    about: dict[str, Any] = {"architecture": args.arch, "vocab_size": vocab_size, "flags": []}
    if others:
        about["target_vocab_size"] = others[0]

    def build(args: Namespace) -> nn.Module:
        model = build_model(args, *sizes.values())
        add_heads(model, state["model"])
        return model

    return about | _describe(args, build)


def add_heads(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Add the heads of a state that the task of a training added to its model."""
    with on_meta():
        if (weight := tensors.get("span_head.out_proj.weight")) is not None:
            add_span_head(model, weight.size(1))
        if hasattr(model, "register_classification_head"):
            model.args.load_checkpoint_heads = True
            model.upgrade_state_dict(dict(tensors))  # fairseq registers the heads that it finds


def composition(state: dict) -> list[dict]:
    """Return name, site, number and axes of each attention layer of a checkpoint, from its arguments."""
    sizes = vocab_sizes(state).values() or (LARGE,)  # attention does not depend on it
    model = build_model(model_arguments(state), *sizes)
    return [
        {"name": layer.name, "site": layer.site, "layer": layer.layer, "axes": axes_of(layer.module)}
        for layer in attention_layers(model)
    ]


def _describe(args: Namespace, build: Callable[[Namespace], nn.Module]) -> dict:
    model = build(args)
    counts = count(model)
    axes: dict[str, dict] = {}
    for layer in attention_layers(model):
        kind = class_of(layer.module, getattr(args, "attention", None) or PLAIN)
        axes.setdefault(layer.site, axes_of(layer.module) | {"class": kind or "not classified"})
    extra: int | None = 0
    if chooses_attention(args):
        try:
            extra = counts["total"] - count(build(plain(args)))["total"]
        except ValueError:
            extra = None
    return {
        "attention_kind": getattr(args, "attention", None) or PLAIN,
        **counts,
        "axes": axes,
        "extra": extra,
        "sizes": [comparison._asdict() for comparison in compare_sizes(model, args)],
    }


def head_sizes(args: Namespace) -> tuple[int, int]:
    """Return number and size of heads of the last stack (the decoder if there is one)."""
    found = list(stacks(args))
    if not found:
        raise FlagError("--arch", args.arch, "has no sizes of an encoder or decoder", "Use another architecture.")
    _, _, width, heads = found[-1]
    return heads, getattr(args, "head_dim", None) or width // heads


def fair_baselines(architecture: str, vocab_size: int, flags: Sequence[str], *, task: str | None = None) -> list[dict]:
    """Return sizes of plain attention with as many parameters as a model, and if they differ, with as large a cache too.

    Plain attention keeps the number of heads. Its head size is that of the model, or smaller if the model's attention has fewer
    parameters. With an equal cache it is what is cached for a token divided by 2·h. The feed-forward size of each stack makes up for
    the difference Δ of its attention: f + Δ / (2·d + 1) for each layer, rounded.

    Returns:
        For each baseline `flags`, `heads`, `head_dim`, `total`, and `cached`, the numbers for a token and layer.

    Raises:
        UserError: plain attention does not work with the sizes.
    """
    args = parse_architecture(architecture, flags, task=task)
    model = build_model(args, vocab_size)
    numbers = [
        getattr(layer.module, "cached_numbers", None) for layer in attention_layers(model) if layer.site != "cross"
    ]
    cached, base, found = [number for number in numbers if number][-1], plain(args), []
    heads, head_dim = head_sizes(base)
    own, all_of_plain = count(model)["attention"], count(build_model(base, vocab_size))["attention"]
    for size in dict.fromkeys((min(head_dim, head_dim * own // all_of_plain), max(1, round(cached / heads / 2)))):
        one = copy(base)
        if size != head_dim:
            one.head_dim = size
        added = {"--head-dim": size} if getattr(one, "head_dim", None) else {}
        ours, others = (count(built)["sites"] for built in (model, build_model(one, vocab_size)))
        for stack, depth, width, _ in stacks(args):
            sites = ("decoder", "cross") if stack == "decoder" else ("encoder",)
            more = sum(ours.get(site, 0) - others.get(site, 0) for site in sites)
            wide = max(1, round(getattr(args, f"{stack}_ffn_embed_dim") + more / (2 * width + 1) / depth))
            setattr(one, f"{stack}_ffn_embed_dim", wide)
            added[f"--{stack}-ffn-embed-dim"] = wide
        words = " ".join(["--attention mha", *(f"{name} {value}" for name, value in added.items())])
        total = count(build_model(one, vocab_size))["total"]
        found.append({"flags": words, "heads": heads, "head_dim": size, "total": total, "cached": 2 * heads * size})
    return found


def sweep(
    architecture: str,
    vocab_size: int,
    quantity: str,
    flags: Sequence[str] = (),
    *,
    methods: Sequence[str],
    task: str | None = None,
) -> list[dict]:
    """Count the parameters of methods over a range of sizes; the attention in `flags` is replaced.

    With `heads` the head size stays and the width grows (width = heads · head size, as in the poster's figures). With
    `layers` every stack gets this number of layers. With `head-dim` number of heads and width stay (FixedHead).

    Returns:
        A row for each method and size; a size that a preset refuses has no row.
    """
    base = parse_architecture(architecture, flags, task=task)
    _, head_dim = head_sizes(base)
    names = [stack for stack, *_ in stacks(base)]

    def sizes(value: int) -> list[str]:
        if quantity == "heads":
            pairs = [("attention-heads", value), ("embed-dim", value * head_dim)]
        else:
            pairs = [("layers", value)] if quantity == "layers" else []
        return [word for stack in names for key, number in pairs for word in (f"--{stack}-{key}", str(number))]

    rows = []
    with Progress("building", len(methods) * len(SWEEPS[quantity]), "models") as progress:
        for value in SWEEPS[quantity]:
            try:
                sized = parse_architecture(architecture, [*flags, *sizes(value)], task=task)
            except ValueError:
                progress.update(len(methods))
                continue
            for preset in methods:
                progress.update()
                try:
                    need = METHODS[preset].needs
                    args = with_preset(sized, preset, keep=("head_dim", *([need.axis] if need else [])))
                    if quantity != "layers":
                        args.head_dim = value if quantity == "head-dim" else head_dim
                    elif need is not None and need.axis == "head_dim" and getattr(args, "head_dim", None) is None:
                        args.head_dim = head_dim
                    counts = count(build_model(args, vocab_size))
                except ValueError:
                    continue
                keep = ("total", "attention", "attention_without_biases")
                rows.append({"attention_kind": preset, quantity: value, **{key: counts[key] for key in keep}})
    return rows


def plot_sweep(rows: list[dict], quantity: str, architecture: str, heads: int, head_dim: int):
    """Return a figure of attention parameters against a size; presets within 2 % of each other share a line."""
    from fairseq_lowrank.tools import pictures

    lines: list[tuple[dict[int, int], list[str]]] = []
    for preset in dict.fromkeys(row["attention_kind"] for row in rows):
        points = {row[quantity]: row["attention"] for row in rows if row["attention_kind"] == preset}
        for known, presets in lines:
            if known.keys() == points.keys() and all(abs(points[x] / known[x] - 1) < 0.02 for x in points):
                presets.append(preset)
                break
        else:
            lines.append((points, [preset]))
    figure, axes = pictures.new_figure(height=4.0 + 0.07 * len(lines))
    lines = sorted(lines, key=lambda line: -max(line[0].values()))
    for (points, presets), style in zip(lines, pictures.styles(presets[0] for _, presets in lines), strict=True):
        parameters = [number / 1e6 for number in points.values()]
        axes.plot(list(points), parameters, **style, marker="o", markersize=3.5, label=", ".join(presets))
    fixed = {"heads": f"d_k = {head_dim}", "layers": f"h = {heads}, d_k = {head_dim}", "head-dim": f"h = {heads}"}
    label = {"heads": "heads (head size fixed)", "layers": "layers", "head-dim": "head size (width fixed)"}[quantity]
    axes.set(xlabel=label, ylabel="attention parameters, millions", title=f"{architecture}, {fixed[quantity]}")
    axes.set_xticks([value for value in SWEEPS[quantity] if value >= max(SWEEPS[quantity]) / 16])
    axes.set_ylim(bottom=0)
    pictures.add_legend(figure, loc="outside lower center", fontsize=8, columns=3)
    return figure
