"""Draw the pictures of docs/pictures that come from `results/` and `benchmarks/results/`.

`python -m experiments pictures --output docs/pictures` writes them.

A method has the marker and the line style of its class, and controls are grey and dashed. Colours of one picture stay apart for
people with a common colour blindness (tests/test_evidence_pictures.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from experiments.class_styles import marker
from experiments.controlled import matrices, nearest_point
from experiments.controlled.runs import lines_of
from experiments.evidence import bottleneck, leads, measure, patterns, published_models, slowdown
from experiments.evidence.lines import RESULTS, ROOT
from fairseq_lowrank.tools import pictures

SHOWN = ("mha", "gain", "mixhead-a", "mixhead-b", "talking-heads", "fixedhead", "mha-more-heads")
"""The methods of the picture of known matrices."""


def known_matrices() -> Figure:
    """Return the errors of known matrices of full rank and 16 positions."""
    lines = lines_of(matrices, RESULTS / "evidence-matrices.jsonl.gz")
    chosen = [one for one in lines if (one["length"], one["rank"]) == (16, 16) and one["method"] in SHOWN]
    drawn = matrices.plot(chosen)
    drawn.axes[0].set_ylabel(f"{matrices.METRIC} (less is better)")
    return drawn


def nearest() -> Figure:
    """Return the errors of nearest point, without the earlier versions of structured scores."""
    lines = lines_of(nearest_point, RESULTS / "evidence-nearest-point.jsonl")
    return nearest_point.plot([one for one in lines if not one["method"].startswith("structured-")])


def cut(ranks: str = "ranks") -> Figure:
    """Return what cuts of published models cost on WikiText-2, with the longest row of each model.

    Args:
        ranks: the field of a line: "ranks" for one basis, "own_ranks" for a basis for each sequence.
    """
    lines = published_models.longest(measure.read(RESULTS / "evidence-published-models.jsonl"))
    return published_models.figure([line for line in lines if line["text"] == "wikitext-2"], ranks)


def time_on_gpu() -> Figure:
    """Return the time of a training step of one layer on a GPU."""
    found = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text(encoding="utf-8"))["layer"]
    settings, results = found["settings"], found["results"]
    labels = {"sdpa": "PyTorch's fused attention", "fairseq": "fairseq's MultiheadAttention"}
    drawn, (axes,) = pictures.grid(1, width=6.4, height=3.8)
    names = list(dict.fromkeys(result["layer"] for result in results))
    kinds = [pictures.STOCK if name == "fairseq" else name for name in names]
    for name, style in zip(names, pictures.styles(kinds), strict=True):
        points = [(one["length"], one["milliseconds"]) for one in results if one["layer"] == name]
        style = (
            {"color": "#8c8c8c", "linestyle": "--", "marker": "s"}
            if name == "sdpa"
            else {"marker": marker(style), **style}
        )
        axes.plot(*zip(*points, strict=True), label=labels.get(name, name), markersize=5, **style)
    lengths = sorted({one["length"] for one in results})
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="sequence length n (16,384 tokens a batch)",
        ylabel="ms, forward and backward (less is better)",
    )
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_yticks([2, 5, 10, 20], ["2", "5", "10", "20"])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    head_dim = settings["embed_dim"] // settings["heads"]
    axes.set_title(
        f"One layer, {settings['heads']} heads of {head_dim}, {settings['dtype']}, {found['machine']['processor']}",
        fontsize=10,
    )
    pictures.add_legend(axes, loc="upper left", fontsize=8)
    return drawn


FIGURES: dict[str, Callable[[], Figure]] = {
    "bottleneck": bottleneck.figure,
    "bottleneck-seen": patterns.figure,
    "cut": cut,
    "cut-own": lambda: cut("own_ranks"),
    "leads": leads.figure,
    "matrices": known_matrices,
    "nearest-point": nearest,
    "slowdown": slowdown.figure,
    "time-gpu": time_on_gpu,
}
