"""Which directions the heads of published models use: lines of results, a table, outcomes of predictions, and a figure.

    python -m experiments.evidence.published_models --results FILE                          print table and outcomes
    python -m experiments.evidence.published_models --results FILE --figure PICTURE.png     also draw loss against rank
    python -m experiments.evidence.published_models --results FILE --add MODEL TEXT SETTING measure.json
    python -m experiments.evidence.published_models --quantise FOLDER OUTPUT                a copy with weights of 4 bits

`examples/evidence/published_models.sh` runs the measurements. Each line has what `fairseq-lowrank measure` found, the commit, the
date, the processor, and a hash of the package's files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from experiments.controlled.runs import origin_here
from experiments.evidence.measure import PREDICTED, append, interval, need, read
from fairseq_lowrank.tools.measuring.verdict import TOLERANCE

ROOT = Path(__file__).parents[2]
MINILM, QUANTISED, SMOLLM2, GEMMA = "all-MiniLM-L6-v2", "all-MiniLM-L6-v2-4bit", "SmolLM2-135M-Instruct", "gemma-3-270m"
SMALLER = "paraphrase-MiniLM-L3-v2"
MODELS = (MINILM, SMOLLM2, GEMMA)
"""Those that the first predictions are about."""
NAMES = {"model": MINILM, "SmolLM2-135M-Instruct.Q4_1": SMOLLM2, "gemma-3-270m-q4_k_m": GEMMA}
"""Names of models, by those of their files."""
BETWEEN = "between most and all"

Line = dict


def line_of(model: str, text: str, setting: str, result: dict) -> Line:
    """Return the numbers of a measurement that the page shows, and where they come from."""
    curve, own = (result["cuts"][kind]["all"] for kind in ("scores", "own"))
    energies = {
        name: statistics.median(number for layer in result["layers"] for number in layer["one_basis"][name])
        for name in ("directions_90", "directions_99")
    }
    return {
        "model": NAMES.get(model, model),
        "text": text,
        "setting": setting,
        "metric": result["metric"],
        "value": result["value"],
        "tolerance": result["tolerance"],
        "worth_share": curve["worth_share"],
        "layers": len(result["layers"]),
        "heads": result["layers"][0]["heads"],
        "size": curve["size"],
        "need": curve["need"],
        "interval": curve["interval"],
        "needs": curve["needs"],
        "own": own["need"],
        "ranks": [[entry["rank"], entry["cost"]] for entry in curve["ranks"]],
        "own_ranks": [[entry["rank"], entry["cost"]] for entry in own["ranks"]],
        "by_layer": [one["needs"] for one in result["cuts"]["scores"].get("layers", ())],
        **energies,
        "tokens_of_basis": result["tokens_of_basis"],
        "sequences_held_out": result["sequences_held_out"],
        "verdict": result["verdicts"][0]["verdict"],
        **origin_here(),
    }


def of(lines: Iterable[Line], *models: str) -> list[Line]:
    """Return the lines of some models."""
    return [line for line in lines if line["model"] in models]


def at(lines: Iterable[Line], tolerance: float) -> list[Line]:
    """Return the lines that were measured at a tolerance."""
    return [line for line in lines if line["tolerance"] == tolerance]


def by_layer(line: Line, tolerance: float) -> list[int]:
    """Return the need of each layer at a tolerance. Lines at 1 % have one need for a layer."""
    return [dict(needs)[tolerance] if isinstance(needs, list) else needs for needs in line["by_layer"]]


def share(line: Line, name: str = "need") -> float:
    """Return a need as a share of the head size."""
    return line[name] / line["size"]


def understated(line: Line) -> float:
    """Return how much smaller the need at 1 % is than that of the line, as a share of the head size."""
    return (line["need"] - need(line)) / line["size"]


def more(line: Line, name: str) -> float:
    """Return by how much a need is greater than that of the same text on 16 sequences, as a share of the head size."""
    return share(line, name) - share(line["few"], name)


def each(models: tuple[str, ...], holds: Callable[[Line], bool], contradicts: Callable[[Line], bool]) -> Callable:
    """Return the rule of a prediction about every line of some models."""

    def rule(lines: list[Line]) -> str:
        found = of(lines, *models)
        if len({line["model"] for line in found}) < len(models):
            return "not run"
        if any(map(contradicts, found)):
            return "contradicted"
        return "held" if all(map(holds, found)) else "unclear"

    return rule


def pairs(
    first: str, second: str, holds: Callable[[Line, Line], bool], contradicts: Callable[[Line, Line], bool]
) -> Callable:
    """Return the rule of a prediction about two models on the same text in the same setting."""

    def rule(lines: list[Line]) -> str:
        places = {(line["text"], line["setting"]): line for line in of(lines, second)}
        found = [
            (line, places[place]) for line in of(lines, first) if (place := (line["text"], line["setting"])) in places
        ]
        if not found:
            return "not run"
        if any(contradicts(*pair) for pair in found):
            return "contradicted"
        return "held" if all(holds(*pair) for pair in found) else "unclear"

    return rule


def texts_agree(lines: list[Line]) -> str:
    """Return the outcome of P7 and P13: the intervals of the need on the two texts overlap; in two or more models they do not."""
    apart, compared = set(), set()
    for line in of(lines, *MODELS):
        for other in of(lines, line["model"]):
            if line["setting"] == other["setting"] and line["text"] < other["text"]:
                compared.add(line["model"])
                (low, high), (other_low, other_high) = interval(line), interval(other)
                if low > other_high or other_low > high:
                    apart.add(line["model"])
    if compared != set(MODELS):
        return "not run"
    return "contradicted" if len(apart) > 1 else "unclear" if apart else "held"


def depths_differ(lines: list[Line]) -> str:
    """Return the outcome of P10: the last third of the layers of SmolLM2 needs more, by the median, than the first third."""
    found = [by_layer(line, PREDICTED) for line in of(lines, SMOLLM2) if line["by_layer"]]
    if not found:
        return "not run"
    thirds = [[statistics.median(part) for part in (one[: len(one) // 3], one[-(len(one) // 3) :])] for one in found]
    if all(first < last for first, last in thirds):
        return "held"
    return "contradicted" if any(first > last for first, last in thirds) else "unclear"


PREDICTIONS: dict[str, Callable[[list[Line]], str]] = {
    "P1": each((MINILM,), lambda line: 0.7 <= share(line) <= 0.9, lambda line: share(line) <= 0.5),
    "P2": each((MINILM,), lambda line: 0.25 <= share(line, "own") <= 0.6, lambda line: share(line, "own") > 0.75),
    "P3": each((SMOLLM2,), lambda line: 0.6 <= share(line) <= 0.95, lambda line: share(line) <= 0.5),
    "P4": each((GEMMA,), lambda line: line["need"] > 64, lambda line: line["need"] <= 64),
    "P5": pairs(GEMMA, SMOLLM2, lambda a, b: share(a) < share(b) - 0.1, lambda a, b: share(a) > share(b)),
    "P6": each(
        MODELS,
        lambda line: line["need"] >= 2 * line["directions_90"],
        lambda line: line["need"] < 1.5 * line["directions_90"],
    ),
    "P7": texts_agree,
    "P8": pairs(
        MINILM, QUANTISED, lambda a, b: abs(a["need"] - b["need"]) <= 2, lambda a, b: abs(a["need"] - b["need"]) > 4
    ),
    "P9": each(
        MODELS,
        lambda line: share(line, "own") > 0.1 and share(line) < 1,
        lambda line: share(line, "own") <= 0.1 or share(line) == 1,
    ),
    "P10": depths_differ,
    "P11": each(
        (SMOLLM2, GEMMA),
        lambda line: line["own"] <= 0.5 * line["need"],
        lambda line: line["own"] > 0.8 * line["need"],
    ),
    "P12": pairs(SMOLLM2, MINILM, lambda a, b: share(a) > share(b) + 0.05, lambda a, b: share(a) < share(b)),
}
"""By their names in results/predictions.json. They are about lines at 1 %, the default when they were written."""
LATER: dict[str, Callable[[list[Line]], str]] = {
    "P13": texts_agree,
    "P14": each(
        (MINILM, SMOLLM2),
        lambda line: share(line, "own") > 0.5 and share(line) < 1,
        lambda line: share(line, "own") <= 0.5 or share(line) == 1,
    ),
    "P15": each(MODELS, lambda line: understated(line) >= 1 / 8, lambda line: understated(line) < 1 / 16),
}
"""Predictions about lines at 0.2 % with sequences of 512 tokens."""


LONGER: dict[str, Callable[[list[Line]], str]] = {
    "P16": each((SMOLLM2,), lambda line: line["verdict"] == "most", lambda line: line["verdict"] == "all"),
    "P17": each((GEMMA,), lambda line: line["verdict"] == BETWEEN, lambda line: line["verdict"] != BETWEEN),
    "P18": each((SMOLLM2, GEMMA), lambda line: more(line, "need") <= 0, lambda line: more(line, "need") > 1 / 32),
    "P19": each(
        (SMOLLM2, GEMMA),
        lambda line: abs(more(line, "own")) <= 1 / 32,
        lambda line: abs(more(line, "own")) > 1 / 16,
    ),
}
"""Predictions about lines at 0.2 % with 64 sequences."""

SECOND: dict[str, Callable[[list[Line]], str]] = {
    "P20": each((SMALLER,), lambda line: line["verdict"] == "all", lambda line: line["verdict"] in ("few", "most")),
    "P21": pairs(SMALLER, MINILM, lambda a, b: a["need"] >= b["need"], lambda a, b: a["need"] < b["need"] - 2),
    "P22": each((SMALLER,), lambda line: 20 <= line["own"] <= 28, lambda line: line["own"] < 16 or line["own"] > 30),
    "P23": each(
        (SMALLER,),
        lambda line: line["need"] >= 2 * line["directions_90"],
        lambda line: line["need"] < 1.5 * line["directions_90"],
    ),
}
"""Predictions about lines of a second embedder at 0.2 %."""


def outcomes(lines: list[Line]) -> dict[str, str]:
    """Return the outcome of every prediction, by name. Lines of quick measurements count like others.

    P10 needs the layers' needs at 1 %, which lines of other tolerances have too.
    """
    found, later = at(lines, PREDICTED), [line for line in at(lines, 0.002) if line["setting"].endswith("x512")]
    first = {name: rule(lines if rule is depths_differ else found) for name, rule in PREDICTIONS.items()}
    first |= {name: rule(later) for name, rule in (LATER | SECOND).items()}
    few = {(line["model"], line["text"]): line for line in later if line["setting"] == "quick16x512"}
    many = {(line["model"], line["text"]): line for line in later if line["setting"] == "quick64x512"}
    longer = [line | {"few": few[key]} for key, line in many.items() if key in few]
    return first | {name: rule(longer) for name, rule in LONGER.items()}


def longest(lines: Iterable[Line]) -> list[Line]:
    """Return a line for each model and text, without the quantised control.

    A line at the default tolerance comes before others, and then the line whose basis had the most tokens.
    """
    found: dict[tuple[str, str], Line] = {}
    for line in sorted(lines, key=lambda line: (line["tolerance"] == TOLERANCE, line["tokens_of_basis"])):
        if line["model"] != QUANTISED:
            found[line["model"], line["text"]] = line
    return sorted(found.values(), key=lambda line: (line["size"], line["model"]))


def table(lines: Iterable[Line]) -> str:
    """Return the page's table, in Markdown. Needs from above and from below are at the tolerance of the line."""
    rows = [
        "| model, text, sequences | layers, heads | loss | attention is worth | need, from above | from below | at other tolerances | 90 %, 99 % of the energy | tokens |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for line in lines:
        low, high = interval(line)
        others = [f"{need} at {100 * share:g} %" for share, need in line["needs"] if share != line["tolerance"]]
        earlier = "" if line["tolerance"] == TOLERANCE else f", at {100 * line['tolerance']:g} %"
        rows.append(
            f"| {line['model']}, {line['text']}, {line['setting']}{earlier} | {line['layers']}, {line['heads']} × {line['size']} | "
            f"{line['value']:.3g} | {100 * line['worth_share']:.3g} % | {line['need']} of {line['size']} ({low} to {high}) | "
            f"{line['own']} | {', '.join(others)} | {line['directions_90']:g}, {line['directions_99']:g} | {line['tokens_of_basis']} |"
        )
    return "\n".join(rows)


def figure(lines: Iterable[Line], ranks: str = "ranks"):
    """Return a figure of the cost against the rank as a share of the head size, with a basis for all sequences, or for each.

    Args:
        ranks: the field of a line: "ranks" for one basis, "own_ranks" for a basis for each sequence.
    """
    from experiments.class_styles import CLASS_COLOURS, MARKERS
    from fairseq_lowrank.tools import pictures

    drawn, axes = pictures.new_figure(6.4, 3.6)
    # grey is for controls
    colours = [colour for colour in CLASS_COLOURS if colour != CLASS_COLOURS[1]]
    for line, colour, marker in zip(lines, itertools.cycle(colours), itertools.cycle(MARKERS), strict=False):
        points = [(rank / line["size"], max(0.0, 100 * cost)) for rank, cost in line[ranks]]
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=line["model"])
    axes.set_title(
        {"ranks": "one basis for all sequences", "own_ranks": "a basis for each sequence"}[ranks], fontsize=10
    )
    axes.axhline(100 * TOLERANCE, color="0.6", linewidth=1)
    axes.annotate(
        f"tolerance: {100 * TOLERANCE:g} %",
        (0, 100 * TOLERANCE),
        xytext=(2, 3),
        textcoords="offset points",
        fontsize=8,
        color="0.4",
    )
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_yticks([0, 0.1, 1, 10, 100], ["0", "0.1", "1", "10", "100"])
    axes.minorticks_off()
    axes.set(
        xlabel="rank of the scores, share of the head size",
        ylabel="cost, % of the worth (less is better)",
        ylim=(-0.03, 130),
    )
    pictures.add_legend(axes, loc="lower left", fontsize=8)
    return drawn


def quantise(folder: Path, output: Path) -> None:
    """Write a copy of a model whose matrices of attention and feed-forward layers are rounded to Q4_1 of GGUF."""
    import gguf
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, output)
    tensors = load_file(folder / "model.safetensors")
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.size(1) % 32 == 0 and tensor.is_floating_point():
            rounded = gguf.quants.dequantize(gguf.quants.quantize(tensor.float().numpy(), kind), kind)
            tensors[name] = torch.from_numpy(rounded).to(tensor.dtype)
    save_file(tensors, output / "model.safetensors", {"format": "pt"})


def main(argv: list[str] | None = None) -> None:
    """Add a line, or print table and outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, metavar="FILE", help="file with a line per model, text and setting")
    parser.add_argument(
        "--has",
        nargs=3,
        metavar=("MODEL", "TEXT", "SETTING"),
        help="end with code 1 without such a line at the default tolerance",
    )
    parser.add_argument("--add", nargs=4, metavar=("MODEL", "TEXT", "SETTING", "FILE"), help="append a measure.json")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="picture to draw")
    parser.add_argument("--quantise", nargs=2, type=Path, metavar=("FOLDER", "OUTPUT"), help="round weights to 4 bits")
    args = parser.parse_args(argv)
    if args.quantise:
        return quantise(*args.quantise)
    if args.results is None:
        parser.error("no file of results given. Add --results FILE.")
    lines = read(args.results)
    if args.has:
        model, *rest = args.has
        found = [NAMES.get(model, model), *rest]
        done = ([line["model"], line["text"], line["setting"]] for line in at(lines, TOLERANCE))
        sys.exit(0 if found in done else 1)
    if args.add:
        *row, file = args.add
        append(args.results, line_of(*row, json.loads(Path(file).read_text(encoding="utf-8"))[0]))
        return None
    print(table(lines))
    for name, found in outcomes(lines).items():
        print(f"{name}: {found}")
    if args.figure:
        figure(lines).savefig(args.figure)
    return None


if __name__ == "__main__":
    main()
