"""Measures of the rank of attention matrices, from their singular values.

The measures follow the Mixhead paper's section 4.4.1. After the softmax hardly any singular value is exactly zero. So a
matrix counts as low-rank if a few singular values have most of their sum.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CURVE_POINTS = 101


def singular_values(matrices: Tensor) -> Tensor:
    """Return singular values in descending order, for any number of matrices at once.

    Args:
        matrices: `[..., T, S]`; half precision is converted to float32. Rows and columns of zeros (padding) only add
            zeros at the end, so sequences of different lengths can be in one batch.

    Returns:
        `[..., min(T, S)]`.
    """
    if matrices.dtype in (torch.float16, torch.bfloat16):
        matrices = matrices.float()
    return torch.linalg.svdvals(matrices)


def shares(values: Tensor) -> Tensor:
    """Return each singular value divided by their sum, `[..., R]`; zeros for a matrix of zeros."""
    return values / values.sum(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)


def cumulative_curve(values: Tensor) -> Tensor:
    """Return cumulative shares of singular values (Mixhead paper, figures 1 and 3): point k is the share of the first k.

    Args:
        values: singular values in descending order, `[..., R]`.

    Returns:
        `[..., R + 1]`, from 0 to 1. Equal singular values give the diagonal. With rank one, all points except the first are 1.
    """
    return F.pad(shares(values).cumsum(-1), (1, 0))


def effective_rank(values: Tensor) -> Tensor:
    """Return exp of the entropy of the singular values' shares: between 1 (rank one) and R (all equal).

    Roy and Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.
    """
    return torch.special.entr(shares(values)).sum(-1).exp()


def area_under_curve(values: Tensor) -> Tensor:
    """Return the area under the cumulative curve over [0, 1]: 0.5 if all singular values are equal, near 1 at rank one."""
    return torch.trapezoid(cumulative_curve(values), dx=1 / values.size(-1))


def mass_in_first(values: Tensor, count: int) -> Tensor:
    """Return the share of the first `count` singular values in the sum, such as the first d_k."""
    if count < 1:
        raise ValueError(f"count={count}: expected a number >= 1")
    return shares(values)[..., :count].sum(-1)


def resample(curve: Tensor, points: int = CURVE_POINTS) -> Tensor:
    """Interpolate a cumulative curve `[..., R + 1]` at `points` equal steps over [0, 1], to average over lengths."""
    flat = curve.reshape(-1, 1, curve.size(-1))
    flat = F.interpolate(flat, size=points, mode="linear", align_corners=True)
    return flat.reshape(*curve.shape[:-1], points)


def measures(values: Tensor, head_dim: int) -> dict[str, Tensor]:
    """Return all scalar measures of singular values `[..., R]`, each `[...]`.

    `rank_share` is the effective rank divided by the greatest possible rank R.
    """
    rank = effective_rank(values)
    return {
        "effective_rank": rank,
        "rank_share": rank / values.size(-1),
        "area": area_under_curve(values),
        "mass_in_head_dim": mass_in_first(values, head_dim),
    }


class Spectra:
    """The spectra of attention matrices of each layer and head, averaged over sequences."""

    def __init__(self) -> None:
        self.layers: dict[tuple[str, int], list[dict[str, Tensor]]] = {}

    def add(self, site: str, layer: int, head_dim: int, weights: Tensor) -> None:
        """Add one sequence's matrices of a layer, `[H, 1, T, S]`."""
        values = singular_values(weights[:, 0])
        found = {"curve": resample(cumulative_curve(values)), **measures(values, head_dim)}
        found["head_dim"] = torch.full_like(found["area"], head_dim)
        found["length"] = torch.full_like(found["area"], values.size(-1))
        self.layers.setdefault((site, layer), []).append(found)

    def summary(self) -> dict[str, dict]:
        """Return for each site `layers`, each with its measures, mean curve and heads, and the `mean` over layers.

        `length` is the mean of the matrices' smaller sides.
        """
        sites: dict[str, dict] = {}
        for (site, layer), found in sorted(self.layers.items()):
            heads = {name: torch.stack([one[name] for one in found]).mean(0) for name in found[0]}
            head_dim, length = int(heads.pop("head_dim")[0]), float(heads.pop("length")[0])
            rows = [{name: value[head].tolist() for name, value in heads.items()} for head in range(len(heads["area"]))]
            entry = {"layer": layer, "head_dim": head_dim, **_mean(heads), "heads": rows}
            sites.setdefault(site, {"length": length, "layers": []})["layers"].append(entry)
        for entry in sites.values():
            names = [name for name in entry["layers"][0] if name not in ("layer", "head_dim", "heads")]
            entry["mean"] = {
                name: torch.tensor([layer[name] for layer in entry["layers"]], dtype=torch.float64).mean(0).tolist()
                for name in names
            }
        return sites


def _mean(heads: dict[str, Tensor]) -> dict:
    return {name: value.double().mean(0).tolist() for name, value in heads.items()}


def plot_layers(results: list[dict], site: str):
    """Return a figure like the Mixhead paper's figure 1, with a plot for each layer and a colour for each checkpoint.

    Thin lines are heads, a bold line is their mean.
    """
    from fairseq_lowrank.tools import pictures

    count = max(len(result["sites"][site]["layers"]) for result in results)
    figure, plots = pictures.grid(count)
    styles = pictures.styles(pictures.kind_of_flags(result["attention"]) for result in results)
    for number, axes in enumerate(plots):
        for style, result in zip(styles, results, strict=True):
            layers = result["sites"][site]["layers"]
            if number < len(layers):
                for head in layers[number]["heads"]:
                    _plot(axes, head["curve"], color=style["color"], linewidth=0.5, alpha=0.25)
                # above the heads of every checkpoint
                label = pictures.plain(result["label"])
                _plot(axes, layers[number]["curve"], **style, linewidth=2, label=label, zorder=3)
        axes.set_title(f"{site}, layer {number}", fontsize=9)
    pictures.add_legend(plots[0], fontsize=7, loc="lower right")
    figure.suptitle(f"{_about(results, site)}: heads (thin) and their mean (bold)", fontsize=10)
    _name_axes(figure)
    return figure


def plot_mean(results: list[dict], site: str):
    """Return a figure like the Mixhead paper's figure 3: thin lines for layers, a bold one for their mean."""
    from fairseq_lowrank.tools import pictures

    figure, axes = pictures.new_figure(5.5, 4.4)
    for style, result in zip(
        pictures.styles(pictures.kind_of_flags(result["attention"]) for result in results), results, strict=True
    ):
        for layer in result["sites"][site]["layers"]:
            _plot(axes, layer["curve"], color=style["color"], linewidth=0.7, alpha=0.6)
        label = pictures.plain(result["label"])
        _plot(axes, result["sites"][site]["mean"]["curve"], **style, linewidth=2.4, label=label)
    axes.set_title(f"{_about(results, site)}: layers (thin), their mean (bold)", fontsize=10)
    pictures.add_legend(axes, fontsize=8, loc="lower right")
    _name_axes(figure)
    return figure


def _about(results: list[dict], site: str) -> str:
    """Return the title for a site: the length of its sequences and its head sizes."""
    found = [result["sites"][site] for result in results]
    lengths = dict.fromkeys(f"{entry['length']:.4g}" for entry in found)
    sizes = dict.fromkeys(str(layer["head_dim"]) for entry in found for layer in entry["layers"])
    return f"{site} attention, n = {', '.join(lengths)}, d_k = {', '.join(sizes)}"


def _plot(axes, curve: list[float], **style) -> None:
    axes.plot([point / (len(curve) - 1) for point in range(len(curve))], curve, **style)
    axes.set(xlim=(0, 1), ylim=(0, 1.01))


def _name_axes(figure) -> None:
    figure.supxlabel("share of singular values, largest first", fontsize=9)
    figure.supylabel("cumulative share of their sum", fontsize=9)
