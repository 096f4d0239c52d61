"""What a trained layer learned beside its projections: head mixing and head embeddings."""

from __future__ import annotations

import re

import torch
from torch import Tensor


def mixing_measures(matrix: Tensor) -> dict[str, float]:
    """Distances of M `[H, H]`: ‖M − I‖_F, and ‖MᵀM − I‖_F (the root of the Mixhead paper's equation 16).

    `off_diagonal` is the share of M's squared norm that lies off the diagonal, that is, comes from other heads.
    """
    matrix = matrix.double()
    identity = torch.eye(matrix.size(0), dtype=matrix.dtype)
    square = matrix.square()
    return {
        "from_identity": (matrix - identity).norm().item(),
        "from_orthogonal": (matrix.T @ matrix - identity).norm().item(),
        "off_diagonal": (1 - square.diagonal().sum() / square.sum().clamp_min(1e-30)).clamp_min(0).item(),
    }


def inspect(parameters: dict[str, Tensor], means: dict[str, Tensor] | None = None) -> list[dict]:
    """A dict for each attention layer that mixes heads or embeds them, in the model's order.

    Args:
        parameters: a model's state dict.
        means: mean M_t of layers with position-wise mixing, by module name; without it their base B stands for M.

    Returns:
        `name`, `site`, `layer`; for mixing `kind` (M, mean M_t or B), `matrix`, the measures of
        :func:`mixing_measures` and, for position-wise mixing, `query_weight_norm` ‖W^M‖_F; for head embeddings
        `query`, `key`, `value`: each head's ℓ2 norm.
    """
    layers: dict[str, dict] = {}
    for key, tensor in parameters.items():
        name, _, rest = key.partition(".mixing.") if ".mixing." in key else key.partition(".head_embeddings.")
        if not rest:
            continue
        site, layer = place(name)
        entry = layers.setdefault(name, {"name": name, "site": site, "layer": layer})
        if ".head_embeddings." in key:
            entry |= {rest: tensor.double().norm(dim=-1).tolist(), "head_dim": tensor.size(-1)}
        elif rest == "query_weight":
            entry["query_weight_norm"] = tensor.double().norm().item()
        elif rest == "weight":
            entry["matrix"] = torch.diag(tensor) if tensor.dim() == 1 else tensor
    for name, entry in layers.items():
        if "matrix" in entry:
            mean = (means or {}).get(name)
            entry["kind"] = "mean M_t" if mean is not None else "B" if "query_weight_norm" in entry else "M"
            matrix = entry["matrix"] if mean is None else mean
            entry |= {"matrix": matrix.tolist(), **mixing_measures(matrix)}
            if (output := parameters.get(f"{name}.out_proj.weight")) is not None:
                entry["head_dim"] = output.size(1) // len(matrix)
    return list(layers.values())


def place(name: str) -> tuple[str, int]:
    """(site, layer) of an attention layer of a state dict, by its name in fairseq's models."""
    layer = int(re.search(r"\.(\d+)\.", name)[1])
    if name.endswith("encoder_attn"):
        return "cross", layer
    return ("encoder" if name.startswith("encoder.") else "decoder"), layer


def draw_mixing(layers: list[dict]):
    """A heat map of M for each layer, as a matplotlib figure: row j is how much of head j enters each mixed head i."""
    from matplotlib.ticker import MaxNLocator

    from fairseq_lowrank.analysis import pictures

    layers = [layer for layer in layers if "matrix" in layer]
    figure, plots = pictures.grid(len(layers), width=2.5, height=2.6)
    limit = max(abs(value) for layer in layers for row in layer["matrix"] for value in row)
    for layer, axes in zip(layers, plots, strict=True):
        image = axes.imshow(layer["matrix"], cmap="RdBu_r", vmin=-limit, vmax=limit)
        axes.grid(False)
        axes.set_title(
            f"{layer['site']} {layer['layer']}: {layer['kind']}\n‖M − I‖ = {layer['from_identity']:.2f}", fontsize=8
        )
        axes.tick_params(labelsize=7)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        if len(layer["matrix"]) <= 8:
            for j, row in enumerate(layer["matrix"]):
                for i, value in enumerate(row):
                    shade = "white" if abs(value) > 0.6 * limit else "black"
                    axes.text(i, j, pictures.number(value), ha="center", va="center", fontsize=5.5, color=shade)
    sizes = dict.fromkeys(
        f"{len(layer['matrix'])} heads" + (f" of size d_k = {layer['head_dim']}" if "head_dim" in layer else "")
        for layer in layers
    )
    figure.suptitle(f"Mixing of {' or '.join(sizes)}", fontsize=10)
    figure.supxlabel("mixed head i", fontsize=9)
    figure.supylabel("head j", fontsize=9)
    figure.colorbar(image, ax=plots, shrink=0.6).set_label("M[j, i]", fontsize=8)
    return figure


def draw_embeddings(layers: list[dict]):
    """Norms of the head embeddings, a plot for queries, keys and values, as a matplotlib figure."""
    from matplotlib.ticker import MaxNLocator

    from fairseq_lowrank.analysis import pictures

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
