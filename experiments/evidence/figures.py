"""Draw the pictures of docs/pictures that come from `results/` and `benchmarks/results/`.

    python -m experiments.evidence.figures --output docs/pictures            all of them
    python -m experiments.evidence.figures leads --output docs/pictures      one

A method has the marker and the line style of its class, and controls are grey and dashed. Colours of one picture stay apart for
people with a common colour blindness (tests/test_evidence_pictures.py).
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from experiments.controlled import matrices, nearest_point
from experiments.controlled.runs import lines_of
from experiments.evidence import bottleneck, leads, measure, published_models, slowdown
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


def cut() -> Figure:
    """Return what cuts of published models cost on WikiText-2, with the longest row of each model."""
    lines = published_models.longest(measure.read(RESULTS / "evidence-published-models.jsonl"))
    return published_models.figure([line for line in lines if line["text"] == "wikitext-2"])


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
            else {"marker": pictures.marker(style), **style}
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


def spectra() -> Figure:
    """Return the effective rank of attention in each layer of word language models: means and ranges over heads."""
    with (RESULTS / "brown-spectra" / "spectrum.csv").open(encoding="utf-8", newline="") as file:
        heads = [line for line in csv.DictReader(file) if line["head"]]
    drawn, (axes,) = pictures.grid(1, width=6.4, height=3.6)
    labels = list(dict.fromkeys(line["label"] for line in heads))
    names = [label.removesuffix("-h32") for label in labels]
    for label, name, style, aside in zip(
        labels, names, pictures.styles(names), sorted(pictures.asides(len(names))), strict=True
    ):
        layers: dict[int, list[float]] = {}
        for line in heads:
            if line["label"] == label:
                layers.setdefault(int(line["layer"]), []).append(float(line["effective_rank"]))
        means = [fmean(found) for found in layers.values()]
        reach = [[mean - min(found) for mean, found in zip(means, layers.values(), strict=True)]]
        reach.append([max(found) - mean for mean, found in zip(means, layers.values(), strict=True)])
        places = [layer + 1 + 0.5 * aside for layer in layers]
        axes.errorbar(
            places, means, reach, label=name, color=style["color"], fmt=pictures.marker(style), capsize=3, markersize=6
        )
    axes.set_xticks(range(1, 1 + len(layers)), map(str, range(1, 1 + len(layers))))
    axes.grid(False, axis="x")
    axes.set(xlabel="layer (methods side by side)", ylabel="effective rank, of 256 (no side is better)")
    axes.set_title("32 heads of 8, word language models: mean, least and greatest head", fontsize=10)
    pictures.add_legend(axes, loc="upper right", fontsize=8)
    return drawn


FIGURES: dict[str, Callable[[], Figure]] = {
    "bottleneck": bottleneck.figure,
    "cut": cut,
    "leads": leads.figure,
    "matrices": known_matrices,
    "nearest-point": nearest,
    "slowdown": slowdown.figure,
    "spectra": spectra,
    "time-gpu": time_on_gpu,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(FIGURES)} (default: all)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where the pictures go, as .png")
    args = parser.parse_args()
    if unknown := set(args.names) - FIGURES.keys():
        parser.error(f"no picture {', '.join(sorted(unknown))}. Choose from {', '.join(FIGURES)}.")
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.names or FIGURES:
        drawn = FIGURES[name]()
        pictures.fit(drawn)
        drawn.savefig(args.output / f"{name}.png", dpi=130)
        print(args.output / f"{name}.png")


if __name__ == "__main__":
    main()
