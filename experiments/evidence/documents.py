"""Byte language models for the headline claims of the documents: which trainings are next, and what the recorded ones say.

Each row has three learning rates under seed 1. While the best on the validation set is at an end of those tried, one more is
trained. Seeds 2 to 6 at the best rate are tested, so no tested seed chose a rate. Losses are bits per byte.

    python -m experiments.evidence.documents           the next trainings of examples/evidence/documents.sh: SEED ROW ROW …
    python -m experiments tables documents             the table of contrasts
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from experiments.engine import finished
from experiments.evidence.lines import RESULTS
from fairseq_lowrank.tools.reporting.statistics import equivalence_p, student

FILE = RESULTS / "evidence-documents.jsonl"
RATES = ("7.5e-4", "1.5e-3", "3e-3", "6e-3", "1.2e-2", "2.4e-2", "4.8e-2")
FIRST_RATES = RATES[2:5]
RATE_SEED, SEEDS = 1, (2, 3, 4, 5, 6)
LONG = {"width-a": (2, 3), "width-b": (2, 3)}
"""Rows that are also trained for 6,000 updates, and the seeds."""
MARGIN = 0.04
"""Bits below which nothing is claimed; the margin of equivalence tests."""

GROUPS = {
    "width": ("a", "b", "8-heads", "e", "2-heads", "4-heads", "16-heads"),
    "depth": ("wide-r4", "deep-r4", "wide-rfull", "deep-rfull", "wide-r16", "deep-r16"),
    "sharing": tuple(
        f"h{heads}-{name}" for heads in (4, 16) for name in ("mha", "mhe-mul", "sha", "narrow", "mhe-add")
    ),
    "sharing more": ("h4-mqa", "h4-skv", "h4-el"),
}
"""Rows in the order of their value: all trainings of a group come before the next one."""

Losses = Mapping[str, Mapping[int, dict]]
"""The recorded lines by row and seed."""


class Contrast(NamedTuple):
    """A weighted sum of rows at their best rates, by seed: what it is, its weights, and what follows on either side of 0."""

    text: str
    weights: Mapping[str, int]
    above: str
    below: str
    end: str = ""


CONTRASTS = (
    Contrast(
        "d 64, 8 × 32 − d 92, 4 × 23",
        {"width-a": 1, "width-b": -1},
        "weights are better spent on width",
        "h·d_k above the width is better",
    ),
    Contrast(
        "the same after 6,000 updates",
        {"width-a": 1, "width-b": -1},
        "weights are better spent on width",
        "h·d_k above the width is better",
        "-6000",
    ),
    Contrast(
        "d 64: 8 × 8 and feed-forward 640 − 8 × 32",
        {"width-8-heads": 1, "width-a": -1},
        "larger heads are better than more feed-forward",
        "feed-forward is better than larger heads",
    ),
    Contrast(
        "d 64, 8 × 32 − d 128, 4 × 32 of twice the weights",
        {"width-a": 1, "width-e": -1},
        "a small width does not match a large one",
        "a small width matches a large one",
    ),
    *(
        Contrast(
            f"d 64: {heads} × {64 // heads} − 4 × 16",
            {f"width-{heads}-heads": 1, "width-4-heads": -1},
            f"{heads} heads are worse",
            f"{heads} heads are better",
        )
        for heads in (2, 8, 16)
    ),
    *(
        Contrast(
            f"(wide − deep at rank {rank}) − (wide − deep at full rank)",
            {
                f"depth-wide-r{rank}": 1,
                f"depth-deep-r{rank}": -1,
                "depth-wide-rfull": -1,
                "depth-deep-rfull": 1,
            },
            "a low rank hurts width more than depth",
            "a low rank hurts depth more than width",
        )
        for rank in (4, 16)
    ),
    *(
        Contrast(
            f"{shape}: rank 4 − full",
            {f"depth-{shape}-r4": 1, f"depth-{shape}-rfull": -1},
            "a low rank costs",
            "a low rank helps",
        )
        for shape in ("wide", "deep")
    ),
    *(
        Contrast(
            f"{heads} heads: `{first}` − `{second}`",
            {f"sharing-h{heads}-{first}": 1, f"sharing-h{heads}-{second}": -1},
            f"`{second}` is better",
            f"`{first}` is better",
        )
        for heads in (4, 16)
        for first, second in (("sha", "mhe-mul"), ("mhe-mul", "narrow"), ("mhe-mul", "mha"), ("mhe-add", "mhe-mul"))
    ),
)


def read(results: Path = FILE) -> Losses:
    """Return the lines of the table by row and seed."""
    found: dict[str, dict[int, dict]] = {}
    for (row, seed, smoke), line in finished(results, "evidence-documents", "documents").items():
        if not smoke:
            found.setdefault(row, {})[seed] = line
    return found


def choose_rate(name: str, found: Losses) -> tuple[str, list[str]]:
    """Return the best rate of a row under seed 1 on validation so far, and the rates that must be tried before it counts."""
    losses = {
        rate: found[f"{name}-{rate}"][RATE_SEED].get("valid_loss", math.inf)
        for rate in RATES
        if RATE_SEED in found.get(f"{name}-{rate}", {})
    }
    if missing := [rate for rate in FIRST_RATES if rate not in losses]:
        return "", missing
    best = min(losses, key=lambda rate: losses[rate])
    place = RATES.index(best)
    around = RATES[max(0, place - 1) : place + 2]
    return best, [rate for rate in around if rate not in losses]


def next_trainings(found: Losses) -> tuple[int, list[str]] | None:
    """Return the seed and the rows to train next, or None if every training is done."""
    for group, names in GROUPS.items():
        rows = [f"{group.split()[0]}-{name}" for name in names]
        chosen = {row: choose_rate(row, found) for row in rows}
        if missing := [f"{row}-{rate}" for row, (_, rates) in chosen.items() for rate in rates]:
            return RATE_SEED, missing
        for end, seeds in (("", dict.fromkeys(rows, SEEDS)), ("-6000", LONG)):
            for seed in SEEDS:
                wanted = [f"{row}-{chosen[row][0]}{end}" for row in rows if seed in seeds.get(row, ())]
                if missing := [row for row in wanted if seed not in found.get(row, {})]:
                    return seed, missing
    return None


def bits(name: str, found: Losses, end: str = "") -> dict[int, float]:
    """Return the test losses of a row at its best rate, in bits per byte, by tested seed; empty while its rate is not chosen."""
    rate, missing = choose_rate(name, found)
    lines = {} if missing else found.get(f"{name}-{rate}{end}", {})
    return {seed: lines[seed]["value"] / math.log(2) for seed in SEEDS if seed in lines}


def by_seed(contrast: Contrast, found: Losses) -> list[float]:
    """Return a contrast by tested seed, for the seeds that all of its rows have."""
    rows = {name: bits(name, found, contrast.end) for name in contrast.weights}
    common = set.intersection(*(set(row) for row in rows.values()))
    return [sum(weight * rows[name][seed] for name, weight in contrast.weights.items()) for seed in sorted(common)]


def verdict(contrast: Contrast, values: list[float]) -> str:
    """Return what follows from a contrast: a side of 0 above the margin, equality within it, or nothing."""
    low, high = student(values)[:2]
    if low is None or high is None:
        return "not tested" if not values else "one seed"
    if low * high > 0 and abs(fmean(values)) >= MARGIN:
        return contrast.above if low > 0 else contrast.below
    if (equivalence_p(values, MARGIN) or 0) < 0.05:
        return f"equal within {MARGIN}"
    return f"no claim below {MARGIN}" if low * high > 0 else "not decided"


def losses_table(found: Losses) -> Iterable[list[str]]:
    """Yield the cells of each row: name, best rate, loss at 2,000 and at 6,000 updates, seeds, weights, and its time."""
    for group, names in GROUPS.items():
        for name in (f"{group.split()[0]}-{one}" for one in names):
            rate, missing = choose_rate(name, found)
            if missing:
                yield [f"`{name}`", "not trained" if not rate else f"not chosen yet ({rate})", *["–"] * 5]
                continue
            row = found[f"{name}-{rate}"]
            tested, longer = bits(name, found), bits(name, found, "-6000")
            speed = fmean(line["tokens_per_second"] for line in row.values())
            yield [
                f"`{name}`",
                rate + ", the end of the grid" * (rate in (RATES[0], RATES[-1])),
                f"{fmean(tested.values()):.3f}" if tested else "–",
                f"{fmean(longer.values()):.3f}" if longer else "–",
                str(len(tested)),
                f"{row[RATE_SEED]['parameters']:,}",
                f"{speed:,.0f}",
            ]


def table(found: Losses) -> Iterable[list[str]]:
    """Yield the cells of each contrast: its text, seeds, mean with the 95 % t interval, p of equality, and the verdict."""
    for contrast in CONTRASTS:
        values = by_seed(contrast, found)
        low, high = student(values)[:2]
        mean = f"{fmean(values):.3f}" if values else "–"
        p = equivalence_p(values, MARGIN)
        yield [
            contrast.text,
            str(len(values)),
            (mean if low is None else f"{mean} ({low:.3f} … {high:.3f})").replace("-", "−"),
            "–" if p is None else f"{p:.3f}",
            verdict(contrast, values),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=FILE, help="the file of lines")
    if found := next_trainings(read(parser.parse_args().results)):
        print(found[0], *found[1])


if __name__ == "__main__":
    main()
