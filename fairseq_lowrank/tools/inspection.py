"""Inspection of trained layers: their composition, mixing, head embeddings and other parts except projections."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from fairseq_lowrank.attention import AttentionConfig, AttentionSpec
from fairseq_lowrank.parts import PARTS


def mixing_measures(matrix: Tensor) -> dict[str, float]:
    """Return distances of M `[H, H]`: ‖M − I‖_F, and ‖MᵀM − I‖_F (the root of the Mixhead paper's equation 16).

    `off_diagonal` is the share of M's squared norm off the diagonal, the part of other heads.
    """
    matrix = matrix.double()
    identity = torch.eye(matrix.size(0), dtype=matrix.dtype)
    square = matrix.square()
    return {
        "from_identity": (matrix - identity).norm().item(),
        "from_orthogonal": (matrix.T @ matrix - identity).norm().item(),
        "off_diagonal": (1 - square.diagonal().sum() / square.sum().clamp_min(1e-30)).clamp_min(0).item(),
    }


# Attention layers in fairseq's models, and the parameters of stock layers. Other parameters belong to parts of this package.
_LAYER = re.compile(r"(.+\.(?:self|encoder)_attn)\.(.+)")
_STOCK_PARAMETER = re.compile(r"(?:[qkv]|in|out)_proj[._].+|bias_[kv]")


def inspect(parameters: dict[str, Tensor], means: dict[str, Tensor] | None = None) -> list[dict]:
    """Return a dict for each attention layer with a saved composition or further learned parts, in the model's order.

    Args:
        parameters: a model's state dict.
        means: mean M_t of layers with position-wise mixing, by module name; without it, their base B is used.

    Returns:
        - `name`, `site`, `layer`, and `axes`: the settings that the layer was saved with, empty if unknown.
        - for mixing: `kind`, `matrix`, `column_sums` (the sum of the weights of each mixed head; below 1, attention is damped),
          the measures of :func:`mixing_measures` and, for position-wise mixing, `query_weight_norm` ‖W^M‖_F. The kind is M, mean
          M_t, B, or W: the weight of a plugin's rule that is not known here, which may compute another M from it.
        - `score_mixing`: the same for mixing of scores (kind L or W).
        - for head embeddings: `query`, `key`, `value`, each head's ℓ2 norm.
        - `norms`: the norms of all other learned parts, by name.
    """
    means = means or {}
    saved = getattr(parameters, "_metadata", {})
    settings = {name: about["attention"] for name, about in saved.items() if "attention" in about}
    learned: dict[str, dict[str, Tensor]] = {}
    for key, tensor in parameters.items():
        if match := _LAYER.fullmatch(key):
            of_layer = learned.setdefault(match[1], {})
            if not _STOCK_PARAMETER.fullmatch(match[2]):
                of_layer[match[2]] = tensor.double()
    layers = []
    for name, of_layer in learned.items():
        if of_layer or name in settings:
            site, layer = site_and_layer(name)
            entry = {"name": name, "site": site, "layer": layer, "axes": settings.get(name, {})}
            output = parameters.get(f"{name}.out_proj.weight")
            layers.append(
                entry | describe(of_layer, entry["axes"], means.get(name), 0 if output is None else output.size(1))
            )
    return layers


def describe(tensors: dict[str, Tensor], axes: dict, mean: Tensor | None, output: int) -> dict:
    """Describe a layer's tensors except its projections; `output` is the input size of its output projection."""
    found: dict = {}
    tensors = dict(tensors)
    if (query_weight := tensors.pop("mixing.query_weight", None)) is not None:
        found["query_weight_norm"] = query_weight.norm().item()
    for axis, letter in (("mixing", "M"), ("score_mixing", "L")):
        weight, known = tensors.get(f"{axis}.weight"), axes.get(axis) in (None, *PARTS[axis])
        # the weight of a rule that is not registered may have any shape; then only its norm is shown
        if weight is None or not (known or weight.size(0) == weight.size(-1)):
            continue
        matrix = tensors.pop(f"{axis}.weight")
        if axis == "mixing" and mean is not None:
            matrix, kind = mean, "mean M_t"
        elif axis == "mixing" and query_weight is not None:
            kind = "B"
        else:
            matrix, kind = _mixing_matrix(matrix, axis, letter, axes)
        measures = _matrix(matrix, kind, axes, output)
        found |= measures if axis == "mixing" else {axis: measures}
    for part in ("query", "key", "value"):
        if (embedding := tensors.pop(f"head_embeddings.{part}", None)) is not None:
            found[part] = embedding.norm(dim=-1).tolist()
            found.setdefault("head_dim", embedding.size(-1))
    if tensors:
        found["norms"] = {name: tensor.norm().item() for name, tensor in tensors.items()}
    return found


def _mixing_matrix(weight: Tensor, axis: str, letter: str, axes: dict) -> tuple[Tensor, str]:
    """Return M or L, computed from the weight by its rule, and the letter; or the weight and `"W"` if no such rule is registered."""
    rule = axes.get(axis)
    if rule is None:
        return weight, letter
    if rule not in PARTS[axis]:
        return weight, "W"
    heads, part = len(weight), PARTS[axis][rule]
    options = {option.name: axes.get(option.name) for option in part.options}
    choices: dict[str, Any] = {axis: rule, **options}
    mixing = AttentionConfig(AttentionSpec(**choices), heads, heads).build(axis).to(weight)
    mixing.weight.data.copy_(weight)
    with torch.no_grad():
        return mixing.operation(None).mixing_matrix(), letter


def _matrix(matrix: Tensor, kind: str, axes: dict, output: int) -> dict:
    """Describe a matrix. If the head size is not saved, it is the size of values."""
    matrix = torch.diag(matrix) if matrix.dim() == 1 else matrix
    head_dim = axes.get("head_dim") or output // len(matrix)
    size = {"head_dim": head_dim} if head_dim else {}
    sums = matrix.sum(0).tolist()
    return {"kind": kind, "matrix": matrix.tolist(), "column_sums": sums, **mixing_measures(matrix), **size}


def site_and_layer(name: str) -> tuple[str, int]:
    """Return site and number of an attention layer of a state dict, from its name in fairseq's models."""
    parts = name.split(".")
    layer = int(next(part for part in parts[1:-1] if part.isdecimal()))
    if parts[-1].startswith("encoder_attn"):
        return "cross", layer
    stacks = [part for part in parts if "encoder" in part or "decoder" in part]
    return ("decoder" if any("decoder" in part for part in stacks) or not stacks else "encoder"), layer


NOTHING_LEARNED = "nothing learned yet"
# A smaller change of mixing is rounding.
LEAST_CHANGE = 1e-6


def learned_change(layer: dict) -> Tensor:
    """Return M − I of a layer; for a plugin's rule its weight W, whose first value is not known."""
    matrix = torch.tensor(layer["matrix"], dtype=torch.float64)
    return matrix if layer["kind"] == "W" else matrix - torch.eye(len(matrix), dtype=torch.float64)


def is_identity(layers: list[dict]) -> bool:
    """Return True if no layer's mixing has changed from the identity."""
    return all(layer["kind"] != "W" and learned_change(layer).abs().max() < LEAST_CHANGE for layer in layers)


def plot_mixing(layers: list[dict], letter: str = "M"):
    """Return a figure with a heat map of M − I, or of L − I, for each layer, all on one scale.

    Row j is the weight of head j in each mixed head i, minus its first value. The weight W of a plugin's rule is shown itself.

    Args:
        letter: M, or L for mixing of scores.
    """
    from matplotlib.ticker import MaxNLocator

    from fairseq_lowrank.tools import pictures

    layers = [layer for layer in layers if "matrix" in layer]
    figure, plots = pictures.grid(len(layers), width=2.5, height=2.6)
    changes = [learned_change(layer) for layer in layers]
    limit = max(change.abs().max().item() for change in changes)
    # numbers below 0.1 are shown in units of a power of ten
    exponent = math.floor(math.log10(limit)) if LEAST_CHANGE < limit < 0.1 else 0
    scale = 10.0**exponent
    limit = limit / scale if limit > LEAST_CHANGE else 1.0
    for layer, change, axes in zip(layers, changes, plots, strict=True):
        image = axes.imshow(change / scale, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axes.grid(False)
        axes.set_title(
            f"{layer['site']} {layer['layer']}: {layer['kind']}\n‖{letter} − I‖ = {layer['from_identity']:.2g}",
            fontsize=8,
        )
        axes.tick_params(labelsize=7)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        if len(layer["matrix"]) <= 8 and not is_identity(layers):
            for j, row in enumerate((change / scale).tolist()):
                for i, value in enumerate(row):
                    shade = "white" if abs(value) > 0.6 * limit else "black"
                    axes.text(i, j, pictures.number(value), ha="center", va="center", fontsize=5.5, color=shade)
    sizes = dict.fromkeys(
        f"{len(layer['matrix'])} heads" + (f" of size d_k = {layer['head_dim']}" if "head_dim" in layer else "")
        for layer in layers
    )
    title = f"Mixing of {'scores of ' if letter == 'L' else ''}{' or '.join(sizes)}"
    figure.suptitle(f"{title}: {NOTHING_LEARNED}" if is_identity(layers) else title, fontsize=10)
    figure.supxlabel("mixed head i", fontsize=9)
    figure.supylabel("head j", fontsize=9)
    shown = "W[j, i]" if layers[0]["kind"] == "W" else f"({letter} − I)[j, i]"
    unit = f" / 1e{exponent}" if exponent else ""
    figure.colorbar(image, ax=plots, shrink=0.6).set_label(shown + unit, fontsize=8)
    return figure


def plot_embeddings(layers: list[dict]):
    """Return a figure of the norms of head embeddings, with a plot each for queries, keys and values."""
    from matplotlib.ticker import MaxNLocator

    from fairseq_lowrank.tools import pictures

    layers = [layer for layer in layers if "query" in layer]
    figure, plots = pictures.grid(3, width=3.4, height=1.5 + 0.22 * len(layers))
    figure.suptitle(
        f"Norms of head embeddings: {len(layers[0]['query'])} heads of size d_k = {layers[0]['head_dim']}", fontsize=10
    )
    limit = max(value for layer in layers for part in ("query", "key", "value") for value in layer[part])
    for part, axes in zip(("query", "key", "value"), plots, strict=True):
        image = axes.imshow([layer[part] for layer in layers], cmap="viridis", vmin=0, vmax=limit, aspect="auto")
        axes.grid(False)
        axes.set_title(f"{part} embeddings", fontsize=9)
        axes.set_xlabel("head", fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_yticks(range(len(layers)), [f"{layer['site']} {layer['layer']}" for layer in layers], fontsize=7)
    figure.colorbar(image, ax=plots, shrink=0.8).set_label("ℓ2 norm", fontsize=8)
    return figure
