"""Compute how many times the updates a language model needs for the loss of a better one, and draw it.

The factor m(T) compares two rows of trainings that each let their learning rate decay to 0. Let the better row reach a loss L
after T updates. The other row reaches L after m(T)·T updates. Its losses are interpolated in log T between its trainings, or
extrapolated from the last two; such a factor is marked.

A constant factor is a slow-down: the same loss, later. A factor that grows with T is a limit.
"""

import math
import tarfile
from collections.abc import Mapping
from statistics import fmean
from typing import NamedTuple

from matplotlib.figure import Figure

from experiments.class_styles import class_style
from experiments.evidence.lines import RESULTS, differences, values
from fairseq_lowrank.records.logs import progress
from fairseq_lowrank.records.statistics import holm, student
from fairseq_lowrank.tools import pictures

LOGS = RESULTS / "logs.tar.xz"
UPDATES = {"": 2000, "-equal-time": 3200, "-6000": 6000, "-9600": 9600}
"""Updates of a training, by the end of its row's name."""
TIME = {"h32-mha": 1.5, "h32-score-mixing": 2.4}
"""Time of an update, in updates of 4 heads of 32: 32 heads of 4 take 1.5 times as long, and score mixing 1.6 times that."""
WINDOW = 200
CONTRASTS = (
    ("h32-mha", "h4-mha"),
    ("h32-mha", "h32-score-mixing"),
    ("h32-mha", "h32-score-gain-x32"),
    ("h32-mha", "h32-mixhead-a"),
    ("h32-mha-6000", "h4-mha-6000"),
    ("h32-mha-6000", "h32-score-mixing-6000"),
    ("h32-score-mixing-6000", "h4-mha-6000"),
)
"""The contrasts with three seeds that the page on language models concludes from."""


class Factor(NamedTuple):
    """A slow-down factor; ``extrapolated`` if no training of the slower row reached the loss."""

    value: float
    extrapolated: bool


def trainings(row: str, seed: int) -> dict[int, float]:
    """Return the bits on the test set of a row's trainings at 2e-3, by their updates."""
    found = {count: values("language-model", row + end, "test").get(seed) for end, count in UPDATES.items()}
    return {count: value for count, value in found.items() if value is not None}


def factor(slower: Mapping[int, float], loss: float, updates: int) -> Factor | None:
    """Return m: the updates that a row needs for a loss, over those of the row that reached it.

    Args:
        slower: losses of the row by updates, which fall.
        loss: the loss to reach.
        updates: the updates after which the other row reached it.

    Returns:
        ``None`` if the row has fewer than two trainings.
    """
    counts = sorted(slower)
    if len(counts) < 2:
        return None
    after = next((place for place in range(1, len(counts)) if slower[counts[place]] <= loss), len(counts) - 1)
    first, second = counts[after - 1], counts[after]
    share = (slower[first] - loss) / (slower[first] - slower[second])
    needed = math.log(first) + share * math.log(second / first)
    return Factor(math.exp(needed) / updates, loss < slower[counts[-1]] or loss > slower[counts[0]])


def factors(slower: str = "h32-mha", better: str = "h4-mha") -> dict[int, dict[int, Factor]]:
    """Return m(T) by T and seed, for each T that the better row was trained for."""
    found: dict[int, dict[int, Factor]] = {}
    for seed in (1, 2, 3):
        for updates, loss in trainings(better, seed).items():
            if (m := factor(trainings(slower, seed), loss, updates)) is not None:
                found.setdefault(updates, {})[seed] = m
    return dict(sorted(found.items()))


def gaps(
    slower: str = "h32-mha-6000", better: str = "h4-mha-6000", at: tuple[int, ...] = (2000, 5800)
) -> list[list[float]]:
    """Return by seed how far a row is behind within its training: training losses in bits, means of 200 updates up to each of ``at``."""
    with tarfile.open(LOGS) as archive:

        def losses(row: str, seed: int) -> dict[int, float]:
            member = archive.extractfile(f"logs/evidence-language-model/{row}-seed{seed}.log")
            assert member is not None
            lines = (progress(line) for line in member.read().decode().splitlines())
            inner = (found[1] for found in lines if found and found[0] == "train_inner")
            return {int(fields["num_updates"]): float(fields["loss"]) for fields in inner}

        found = []
        for seed in (1, 2, 3):
            one, other = losses(slower, seed), losses(better, seed)
            found.append([fmean(one[u] - other[u] for u in one if end - WINDOW < u <= end) for end in at])
        return found


def table() -> str:
    """Return a table of m(T) of heads of 4, and of score mixing in updates and in time, by seed."""
    lines = ["| row | updates T | m(T) by seed | mean | m(T) in time |", "| --- | --- | --- | --- | --- |"]
    for row in ("h32-mha", "h32-score-mixing"):
        for updates, by_seed in factors(row).items():
            mean = fmean(m.value for m in by_seed.values())
            shown = ", ".join(f"{m.value:.2f}{'*' * m.extrapolated}" for m in by_seed.values())
            lines.append(f"| `{row}` | {updates:,} | {shown} | {mean:.2f} | {mean * TIME.get(row, 1):.2f} |")
    return "\n".join(lines)


def contrasts() -> str:
    """Return a table of the contrasts that the page concludes from, with Holm's correction over them."""
    rows = []
    for worse, better in CONTRASTS:
        found = differences([worse, better], table="language-model", split="test")
        low, high, _, p = student(found)
        rows.append((f"`{worse}` − `{better}`", fmean(found), low, high, p))
    lines = ["| contrast | mean, bits | 95 % interval (t) | p | p after Holm |", "| --- | --- | --- | --- | --- |"]
    for (name, mean, low, high, p), corrected in zip(rows, holm([row[-1] for row in rows]), strict=True):
        lines.append(
            f"| {name} | {mean:.3f} | {low:.3f} … {high:.3f} | {p:.3f} | {corrected:.3f} |".replace("-0.", "−0.")
        )
    return "\n".join(lines)


def gap() -> str:
    """Return how the gap in training loss falls within the trainings of 6,000 updates, by seed, with a t interval."""
    within = gaps()
    falls = [first - last for first, last in within]
    low, high = student(falls)[:2]
    by_seed = ", ".join(f"{first:.3f} → {last:.3f}" for first, last in within)
    return f"{by_seed}. It falls by {fmean(falls):.3f} on average ({low:.3f} … {high:.3f})."


def figure() -> Figure:
    """Return a figure of the loss of each training against its updates, a line for each row and seed."""
    drawn, (axes,) = pictures.grid(1, width=6.4, height=3.8)
    rows = {
        "h4-mha": ("4 heads of 32", class_style(None)),
        "h32-mha": ("32 heads of 4", class_style("OV") | {"linestyle": "--", "marker": "s"}),
        "h32-score-mixing": ("32 heads of 4, mixing before the softmax", class_style("QK")),
    }
    for row, (label, style) in rows.items():
        for seed in (1, 2, 3):
            points = trainings(row, seed)
            axes.plot(
                list(points),
                list(points.values()),
                **style,
                linewidth=1,
                markersize=5,
                label=label if seed == 1 else None,
            )
    axes.set_xscale("log")
    counts = sorted(set(UPDATES.values()) & {count for row in rows for count in trainings(row, 1)})
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("updates of a training, whose rate decays to 0")
    axes.set_ylabel("bits per symbol, test (less is better)")
    axes.set_title("Byte language model at 2e-3, a line for each seed")
    axes.legend(frameon=False, fontsize=8)
    return drawn
