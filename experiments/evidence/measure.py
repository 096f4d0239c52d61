"""Measure models whose answer is known with `fairseq-lowrank measure`, and compare the needs with predictions.

    python -m experiments.evidence.measure --results results/evidence-measure.jsonl            train, measure, and print
    python -m experiments.evidence.measure --results results/evidence-measure.jsonl --print    print the tables of the page

Each line has a model, a seed and what was measured. Lines that exist are kept, so an interrupted run resumes. A checkpoint that
was trained elsewhere is measured by the command itself; `--add NAME SEED FILE` appends the first result of its measure.json.

A line replaces that of the same model and seed with another tolerance.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.controlled import matrices, nearest_point, recall
from experiments.controlled.runs import Journal, Method, origin_here
from experiments.engine import refuse_dirty
from fairseq_lowrank.files import read_lines, regular_file, say, write_lines
from fairseq_lowrank.records.locks import locked
from fairseq_lowrank.records.results import append_line
from fairseq_lowrank.tools.measuring.curve import lower_end
from fairseq_lowrank.tools.measuring.layers import LayerSubject
from fairseq_lowrank.tools.measuring.measurement import measure
from fairseq_lowrank.tools.measuring.subject import BITS, Metric
from fairseq_lowrank.tools.measuring.verdict import TOLERANCE

ROOT = Path(__file__).parents[2]
SEEDS = (1, 2)
POINT_STEPS = 5_000
RECALL_STEPS = 2_400
ERROR = Metric("squared error", True)
PREDICTED = 0.01
"""The tolerance that predictions are about. It was the default when they were written."""


def quiet(line: str) -> None:
    """Ignore a line of a log."""


def nearest(method: Method, heads: int, seed: int) -> LayerSubject:
    """Return a layer that was trained on the nearest point, with new sets of points."""
    layer = nearest_point.trained(method, heads, seed, POINT_STEPS, quiet)
    generator = torch.Generator().manual_seed(2_000_000 + seed)
    samples = [nearest_point.points(1, generator) for _ in range(200)]

    def error(x: Tensor) -> tuple[float, float]:
        return nearest_point.squared_error(layer, x).item() * len(x), float(len(x))

    places = [("attention", "encoder", 0, layer.attention)]
    return LayerSubject("nearest point", places, samples, error, ERROR, nearest_point.POINTS)


def patterns(heads: int, rank: int, seed: int, *, length: int = 16) -> LayerSubject:
    """Return a layer that was trained on eight known matrices, with random contents."""
    positions, wanted = matrices.problem(length, rank, "own", seed)
    layer = matrices.trained(Method("mha", "mha"), heads, positions, wanted, seed, matrices.STEPS, quiet)
    generator = torch.Generator().manual_seed(2_000_000 + seed)
    shape = (length, matrices.EMBED_DIM)
    samples = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(200)]
    query = positions.unsqueeze(1)

    def error(content: Tensor) -> tuple[float, float]:
        output, _ = layer(query, query, content.unsqueeze(1), need_weights=False)
        slices = content.unflatten(1, (len(wanted), -1))
        answer = torch.einsum("cts,scd->tcd", wanted, slices).flatten(1)
        return (output[:, 0] - answer).square().sum().item(), answer.square().sum().item()

    return LayerSubject("known matrices", [("layer", "encoder", 0, layer)], samples, error, ERROR, length)


def recalled(heads: int, seed: int) -> LayerSubject:
    """Return a model that was trained on associative recall, with new sequences."""
    model, _, _ = recall.trained(Method("mha", "mha"), heads, seed, RECALL_STEPS, Journal("recall"))
    tokens, answers = recall.sequences(96, torch.Generator().manual_seed(2_000_000 + seed))

    def score(sample: tuple[Tensor, Tensor]) -> tuple[float, float]:
        text, right = sample
        asked = right != recall.IGNORED
        logits = model(text)[asked]
        return F.cross_entropy(logits, right[asked], reduction="sum").item() / math.log(2), float(asked.sum())

    samples = list(zip(tokens.split(1), answers.split(1), strict=True))
    places = [(f"blocks.{i}.attention", "decoder", i, block.attention) for i, block in enumerate(model.blocks)]
    return LayerSubject("recall", places, samples, score, BITS, recall.LENGTH)


MHA = Method("mha", "mha")
MODELS: dict[str, Callable[[int], LayerSubject]] = {
    "patterns-16x4": lambda seed: patterns(16, 16, seed),
    "patterns-4x16-rank8": lambda seed: patterns(4, 8, seed),
    "patterns-4x16": lambda seed: patterns(4, 16, seed),
    "point-8x4": lambda seed: nearest(MHA, 8, seed),
    "point-1x32": lambda seed: nearest(MHA, 1, seed),
    "point-8x4-score-mixing": lambda seed: nearest(Method("score-mixing", "mha", {"score_mixing": "static"}), 8, seed),
    "recall-1x64": lambda seed: recalled(1, seed),
    "recall-8x8": lambda seed: recalled(8, seed),
}
"""The models of known answer, each a function of the seed."""


class Prediction(NamedTuple):
    """A prediction about the needs of a model.

    Args:
        model: a name of :data:`MODELS`, or of a line that ``--add`` appended.
        holds: the lines agree with the prediction.
        contradicts: the lines contradict the prediction.
    """

    model: str
    holds: Callable[[dict], bool]
    contradicts: Callable[[dict], bool]


def need(line: dict, tolerance: float = PREDICTED) -> int:
    """Return the need at a tolerance."""
    return dict(line["needs"])[tolerance]


PREDICTIONS = {
    "E1": Prediction("point-8x4", lambda line: need(line) == 4, lambda line: need(line) < 4),
    "E2": Prediction("point-1x32", lambda line: need(line) >= 24, lambda line: need(line) <= 16),
    "E3": Prediction("point-8x4-score-mixing", lambda line: need(line) >= 16, lambda line: need(line) <= 4),
    "E4": Prediction("patterns-16x4", lambda line: need(line) == 4, lambda line: need(line) < 4),
    "E5": Prediction("patterns-4x16-rank8", lambda line: need(line) <= 8, lambda line: need(line) > 8),
    "E6": Prediction("patterns-4x16", lambda line: need(line) >= 13, lambda line: need(line) <= 8),
    "E7": Prediction("recall-1x64", lambda line: need(line) <= 32, lambda line: need(line) > 48),
    "E8": Prediction("recall-8x8", lambda line: need(line) <= 4, lambda line: need(line) >= 7),
    "E10": Prediction("language-4x32", lambda line: need(line) <= 20, lambda line: need(line) > 28),
    "E11": Prediction("language-32x4", lambda line: need(line) == 4, lambda line: need(line) < 3),
    "E12": Prediction("quickstart", lambda line: need(line) <= 16, lambda line: need(line) > 24),
    "E13": Prediction("language-4x32-6000", lambda line: 18 <= need(line) <= 28, lambda line: need(line) < 14),
    "E14": Prediction("language-32x4-6000", lambda line: need(line) == 4, lambda line: need(line) < 3),
    "E15": Prediction(
        "language-32x4-score-mixing-6000",
        lambda line: loss_at(line, 4) > 0.34,
        lambda line: loss_at(line, 4) < 0.1,
    ),
    "E16": Prediction("language-32x4-3e-3", lambda line: need(line) == 4, lambda line: need(line) < 4),
    "E17": Prediction("language-32x4-3e-3", lambda line: need(line, 0.05) < 4, lambda line: need(line, 0.05) == 4),
    "E18": Prediction("language-4x32-6e-3", lambda line: 17 <= need(line) <= 28, lambda line: need(line) <= 12),
    "E19": Prediction(
        "language-32x4-score-mixing-6e-3", lambda line: 16 < need(line) <= 48, lambda line: need(line) <= 4
    ),
    "E21": Prediction("language-32x4", lambda line: need(line, 0.002) == 4, lambda line: need(line, 0.002) < 4),
    "E22": Prediction(
        "language-32x4-score-mixing", lambda line: 20 <= need(line, 0.002) <= 48, lambda line: need(line, 0.002) <= 4
    ),
    "E23": Prediction(
        "language-4x32-6000", lambda line: 17 <= need(line, 0.002) <= 28, lambda line: need(line, 0.002) >= 30
    ),
    "E24": Prediction("language-32x4-6000", lambda line: need(line, 0.002) == 4, lambda line: need(line, 0.002) < 4),
    "E25": Prediction(
        "language-32x4-score-mixing-6000",
        lambda line: 28 <= need(line, 0.002) <= 56,
        lambda line: need(line, 0.002) <= 16,
    ),
    "E26": Prediction("multi30k-4x32", lambda line: 9 <= need(line, 0.002) <= 20, lambda line: need(line, 0.002) > 26),
}
"""By their names in results/predictions.json. E9 and E20 are about several models; see :func:`separates` and :func:`stands`."""
ANSWERS = {
    "patterns-16x4": (4, 4),
    "patterns-4x16-rank8": (7, 9),
    "patterns-4x16": (14, 16),
    "point-8x4": (4, 4),
    "point-1x32": (28, 32),
    "point-8x4-score-mixing": (28, 32),
    "language-32x4-3e-3": (4, 4),
    "language-4x32-6e-3": (5, 28),
    "language-32x4-score-mixing-6e-3": (5, 128),
}
"""The least and the greatest need that is right. An answer that is a number allows an eighth of it, the unit of verdicts."""
LONGER = "-2000"
"""The end of the name of a model that had 2,000 updates, where the others of its kind had 400."""
BOUND, FREE = ("point-8x4", "patterns-16x4"), ("patterns-4x16-rank8", "recall-1x64")


def outcome(prediction: Prediction, lines: Iterable[dict]) -> str:
    """Return held (under each seed), contradicted (under one or more), unclear, or not run; of one seed, what it says."""
    found = [line for line in lines if line["model"].removesuffix(LONGER) == prediction.model]
    if not found:
        return "not run"
    one = len(found) == 1
    if any(map(prediction.contradicts, found)):
        return "against the prediction under one seed" if one else "contradicted"
    if all(map(prediction.holds, found)):
        return "as predicted under one seed" if one else "held"
    return "unclear under one seed" if one else "unclear"


def separates(lines: Iterable[dict]) -> str:
    """Return the outcome of E9: the share of the last quarter is above 0.05 in bound tasks, and below 0.01 in others."""
    lines = list(lines)
    bound, free = ([line["last_quarter"] for line in lines if line["model"] in names] for names in (BOUND, FREE))
    if not bound or not free:
        return "not run"
    if min(bound) <= max(free):
        return "contradicted"
    return "held" if min(bound) > 0.05 and max(free) < 0.01 else "unclear"


def right_needs(lines: Iterable[dict]) -> dict[float, int]:
    """Return by tolerance the number of lines whose need is right."""
    counts: dict[float, int] = {}
    for line in lines:
        if line["model"] in ANSWERS:
            least, greatest = ANSWERS[line["model"]]
            for share, need in line["needs"]:
                counts[share] = counts.get(share, 0) + (least <= need <= greatest)
    return counts


def stands(lines: Iterable[dict]) -> str:
    """Return the outcome of E20: at 1 % every need is right; at another tolerance more needs are right."""
    lines = [line for line in lines if line["model"] in ANSWERS]
    if {line["model"] for line in lines} < ANSWERS.keys():
        return "not run"
    counts = right_needs(lines)
    if counts[PREDICTED] == len(lines):
        return "held"
    return "contradicted" if counts[PREDICTED] < max(counts.values()) else "unclear"


def outcomes(lines: Iterable[dict]) -> dict[str, str]:
    """Return the outcome of every prediction, by name."""
    lines = list(lines)
    found = {name: outcome(prediction, lines) for name, prediction in PREDICTIONS.items()}
    found |= {"E9": separates(lines), "E20": stands(lines)}
    return dict(sorted(found.items(), key=lambda pair: int(pair[0][1:])))


def loss_at(line: dict, rank: int) -> float:
    """Return how much loss a cut to a rank adds, in the unit of the metric."""
    return dict(line["ranks"])[rank] * abs(line["value"]) * line["worth_share"]


def interval(line: dict) -> tuple[int, int]:
    """Return the interval of the need. In older lines its lower end is a tried rank, which is too high."""
    low, high = line["interval"]
    return lower_end(low, (rank for rank, _ in line["ranks"])), high


def line_of(model: str, seed: int, result: dict) -> dict:
    """Return the numbers of a measurement that the page shows."""
    curve, values = result["cuts"]["scores"]["all"], result["cuts"]["values"]["all"]

    def median(name: str) -> float:
        return statistics.median(number for layer in result["layers"] for number in layer["one_basis"][name])

    return {
        "model": model,
        "seed": seed,
        "metric": result["metric"],
        "value": result["value"],
        "size": curve["size"],
        "need": curve["need"],
        "interval": curve["interval"],
        "ranks": [[entry["rank"], entry["cost"]] for entry in curve["ranks"]],
        "values_size": values["size"],
        "values_need": values["need"],
        "directions_90": median("directions_90"),
        "directions_99": median("directions_99"),
        "last_quarter": median("last_quarter"),
        "tolerance": result["tolerance"],
        "worth_share": curve["worth_share"],
        "needs": curve["needs"],
        "own": result["cuts"]["own"]["all"]["need"],
        "tokens_of_basis": result["tokens_of_basis"],
        "sequences_held_out": result["sequences_held_out"],
        "verdict": result["verdicts"][0]["verdict"],
    }


def table(lines: Iterable[dict]) -> str:
    """Return the table of needs at the three tolerances, in Markdown. The interval is that at the tolerance of the line."""
    rows = [
        "| model, seed | answer | loss | attention is worth | need at 0.2 % | at 1 % | at 5 % | from below | 90 %, 99 % of the energy | last quarter | values need |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for line in lines:
        low, high = interval(line)
        answer = " to ".join(map(str, dict.fromkeys(ANSWERS.get(line["model"], ("–",)))))
        needs = [
            f"{rank} of {line['size']} ({low} to {high})" if share == line["tolerance"] else str(rank)
            for share, rank in line["needs"]
        ]
        rows.append(
            f"| {line['model']}, {line['seed']} | {answer} | {line['value']:.3g} | {100 * line['worth_share']:,.1f} % | "
            f"{' | '.join(needs)} | {line['own']} | {_energy(line)}"
        )
    return "\n".join(rows)


def _energy(line: dict) -> str:
    return (
        f"{line['directions_90']:g}, {line['directions_99']:g} | {100 * line['last_quarter']:.2g} % | "
        f"{line['values_need']} of {line['values_size']} |"
    )


def read(path: Path) -> list[dict]:
    """Return the lines of a file, none if it does not exist. A broken line is left out, and named."""
    lines = []
    for number, text in enumerate(read_lines(path) if path.exists() else (), start=1):
        try:
            lines.append(json.loads(text))
        except ValueError as error:
            say(f"{path}, line {number}: not JSON ({error}). The line is left out.")
    return lines


def append(path: Path, line: dict) -> None:
    """Append a line to a file, with the origin of the code that writes it."""
    append_line(path, line | origin_here())


def replace(path: Path, line: dict) -> None:
    """Append a line to a file, and remove earlier lines of the same model and seed."""
    with locked(path.parent, os.O_RDONLY):  # write_lines makes a new file, so a lock on the old one would not hold
        kept = [one for one in read(path) if (one["model"], one["seed"]) != (line["model"], line["seed"])]
        write_lines(path, map(json.dumps, [*kept, line | origin_here()]))


def main(argv: list[str] | None = None) -> None:
    """Train and measure the models that have no line yet, and print tables and outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, required=True, metavar="FILE", help="file with a line per model and seed"
    )
    parser.add_argument("--print", action="store_true", help="train nothing")
    parser.add_argument(
        "--add", nargs=3, metavar=("NAME", "SEED", "FILE"), help="append the first result of a measure.json"
    )
    args = parser.parse_args(argv)
    regular_file(args.results)
    if not args.print:
        refuse_dirty(origin_here()["commit"])
    if args.add:
        name, seed, file = args.add
        replace(args.results, line_of(name, int(seed), json.loads(Path(file).read_text(encoding="utf-8"))[0]))
    elif not args.print:
        for seed in SEEDS:
            for name, build in MODELS.items():
                row = (name, seed, TOLERANCE)
                if any((one["model"], one["seed"], one.get("tolerance")) == row for one in read(args.results)):
                    continue
                start = time.process_time()
                replace(args.results, line_of(name, seed, measure(build(seed), name)))
                print(f"{name}, seed {seed}: {time.process_time() - start:.0f} s", file=sys.stderr)
    lines = read(args.results)
    print(table(lines))
    for name, found in outcomes(lines).items():
        print(f"{name}: {found}")


if __name__ == "__main__":
    main()
