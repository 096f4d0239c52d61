"""The predictions of the evidence, as they were committed, with their outcomes: ``results/predictions.json``.

A group has the name of its experiment, what was known when it was written, and its predictions. A prediction has

- ``id``, ``rows``, ``text`` and ``rule``: its name, what it is about, what was predicted, and what would contradict it;
- ``commit``: where the words stand as they are here;
- ``outcome``: what came out, in words;
- ``compute``, for some: how the outcome follows from recorded lines, a list of arguments of :func:`computed`.
"""

from __future__ import annotations

import functools
import json
import math
from statistics import fmean
from typing import Any

from experiments.evidence.lines import RESULTS, differences
from fairseq_lowrank.records.statistics import student

INTRODUCTION = """The words are those of the commit in the last column. Pages have other words for some things: *fit* is the
training loss, *lead* and *gain* over `mha` are the same difference, and a *small* start is a half-scale start.

*Held*: as predicted. *Contradicted*: as the column before it says. *Unclear*: neither. One seed settles nothing: its outcome is
*as predicted under one seed* or *against the prediction under one seed*.

*Computed* has the mean over seeds of what was predicted, its 95 % t interval, and its share of another difference where one was
predicted. The outcome of such a row follows from its lines. Errors of known matrices are geometric means or their ratios."""
FILE = RESULTS / "predictions.json"


@functools.cache
def groups() -> list[dict[str, Any]]:
    """Return the groups of predictions in the order of the file."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def computed(
    rows: list[str],
    held: list[float | None],
    allowed: list[float | None],
    share_of: list[str] | None = None,
    sign: bool = False,
    ratio: bool = False,
    **of: Any,
) -> tuple[str, str]:
    """Return the outcome of a prediction about the mean over seeds, and its numbers.

    Args:
        rows: one row, or two whose difference counts.
        held: the least and the greatest mean as predicted; ``None`` for no bound.
        allowed: the least and the greatest mean that do not contradict the prediction.
        share_of: two rows; the mean is divided by the mean of their difference.
        sign: True if an interval that includes 0 decides nothing.
        ratio: True for the geometric mean of a row, or of the ratio of two rows.
        of: the table of the rows, and the split or file if it is not the usual one.
    """
    found = differences(rows, logarithm=ratio, **of)
    if not found:
        return "not run", ""
    low, high = student(found)[:2] if len(found) > 1 and not ratio else (None, None)
    mean = math.exp(fmean(found)) if ratio else fmean(found)
    numbers = f"{mean:.2g}".replace("e-0", "e-") if ratio else f"{mean:z.3f}".replace("-", "−")
    numbers += "" if low is None else f" ({low:z.3f} … {high:z.3f})".replace("-", "−")
    if share_of:
        mean /= fmean(differences(share_of, **of))
        numbers += f", {100 * mean:.0f} %"
    if sign and low is not None and low < 0 < high:
        return "unclear", numbers
    inside = [(a is None or mean >= a) and (b is None or mean <= b) for a, b in (held, allowed)]
    word = "held" if inside[0] else "unclear" if inside[1] else "contradicted"
    if len(found) == 1:
        word = {"held": "as predicted", "contradicted": "against the prediction"}.get(word, word) + " under one seed"
    return word, numbers


# The outcome of a prediction with several parts is the first of these that one part has.
_STRONGEST = ("contradicted", "against the prediction under one seed", "unclear", "unclear under one seed")
_STRONGEST += ("not run", "as predicted under one seed", "held")


def outcome(parts: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the outcome of a prediction with several parts, and the numbers of each.

    It holds if each part does, and is contradicted if one part is.
    """
    found = [computed(**part) for part in parts]
    return min((word for word, _ in found), key=_STRONGEST.index), "; ".join(numbers for _, numbers in found)


def tables() -> list[str]:
    """Return all predictions: for each experiment what was known, and tables of predictions with outcomes, in Markdown."""
    parts = [INTRODUCTION]
    before = None
    for group in groups():
        if group["experiment"] != before:
            before = group["experiment"]
            parts.append(f"## {before.replace('-', ' ').capitalize()}")
        parts.append(group["known"])
        rows = [["", "rows", "prediction", "contradicted by", "outcome", "computed", "commit"], ["---"] * 7]
        for one in group["predictions"]:
            numbers = outcome(one["compute"])[1] if "compute" in one else ""
            words = [one[name] for name in ("rows", "text", "rule", "outcome")]
            rows.append([one["id"], *words, numbers, one["commit"][:8]])
        parts += ["\n".join("| " + " | ".join(row) + " |" for row in rows), group["remarks"]]
    return [part for part in parts if part]
