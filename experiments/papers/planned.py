"""Contrasts that were predicted before the runs, and the outcomes of the predictions: held, contradicted or unclear."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq_lowrank.cli import compare
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.records import contrasts, statistics
from fairseq_lowrank.records.contrasts import Contrast
from fairseq_lowrank.records.lines import listed

SIDES = {">": ">", "at least": ">", "<": "<", "at most": "<", "=": "="}
HELD, CONTRADICTED, UNCLEAR = "held", "contradicted", "unclear"
OUTCOME_COLOURS = {HELD: "#0072b2", CONTRADICTED: "#e06040", UNCLEAR: "#8c8c8c", None: "#000000"}
COLOUR_NAMES = {HELD: "blue", CONTRADICTED: "red", UNCLEAR: "grey"}
# Equality is claimed if the two one-sided tests have a p below this.
EQUIVALENCE_LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class PredictedContrast(Contrast):
    """A contrast and its result, with the prediction before the runs.

    Args:
        prediction: see :func:`read_prediction`.
        margin: with a prediction of equality, such as "= 0", the greatest difference that counts as equal.
    """

    prediction: str
    margin: float | None = None

    @property
    def equivalence_p(self) -> float | None:
        """Return the p of the test that the difference is within the margin."""
        if self.margin is None or self.comparison is None:
            return None
        _, value = read_prediction(self.prediction)
        return statistics.equivalence_p(
            [mean - value for mean in self.comparison.seed_means], self.margin, self.resolution
        )

    @property
    def outcome(self) -> str | None:
        """Return held, contradicted or unclear, by Student's 95 % interval over seeds, or by the test of equivalence.

        A prediction is contradicted if the entire interval is on the other side (for an equality: outside the margin).
        """
        if self.comparison is None:
            return None
        if self.comparison.low is None or self.comparison.high is None:
            return UNCLEAR
        side, value = read_prediction(self.prediction)
        low, high = self.comparison.low - value, self.comparison.high - value
        if side == "=":
            if (p := self.equivalence_p) is not None and p < EQUIVALENCE_LEVEL:
                return HELD
            margin = self.margin or 0.0
            return CONTRADICTED if low > margin or high < -margin else UNCLEAR
        if side == "<":
            low, high = -high, -low
        return HELD if low > 0 else CONTRADICTED if high < 0 else UNCLEAR


@dataclass(frozen=True)
class Plan:
    """A contrast that was chosen and predicted before the runs: A − B, or (A − B) − (C − D).

    Args:
        margin: with the prediction "= 0", the greatest difference that counts as 0.
    """

    name: str
    rows: tuple[str, ...]
    metric: str
    split: str
    prediction: str
    margin: float | None = None


def read_planned(path: Path, table: str) -> list[Plan]:
    """Read a table's contrasts from a JSON file: ``{TABLE: [{"name", "rows", "metric", "split", "prediction"}, …]}``.

    If the prediction is "= 0", an entry may have a ``margin``.

    Raises:
        UserError: there is no such file or table, or an entry is not a contrast.
    """
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}. Give a JSON file.") from error
    if not isinstance(tables, dict) or not isinstance(tables.get(table), list):
        known = listed(tables) if isinstance(tables, dict) else "none"
        raise UserError(f"{path}: no contrasts for table {table!r}. Choose from {known}.")
    found = []
    for entry in tables[table]:
        try:
            one = Plan(**entry)
            _check_planned(one)
        except (TypeError, ValueError) as error:
            fields = ", ".join(field.name for field in dataclasses.fields(Plan))
            text = json.dumps(entry, ensure_ascii=False)[:60]
            raise UserError(f"{path}: {text} is not a contrast ({error}). Give {fields}.") from error
        found.append(one)
    return found


def read_prediction(text: str) -> tuple[str, float]:
    """Return the side (``>``, ``<`` or ``=``) and the number of a text such as "> 0", "= 0", "at least 0.1" or "at most 0.1".

    Raises:
        UserError: the text has another form.
    """
    match = re.fullmatch(rf"({'|'.join(SIDES)}) (-?\d+(?:\.\d+)?)", text) if isinstance(text, str) else None
    if match is None:
        raise UserError(f"prediction is {text!r}, expected one of {', '.join(SIDES)}, with a number")
    return SIDES[match[1]], float(match[2])


def _check_planned(one: Plan) -> None:
    """Raise UserError unless a contrast is complete."""
    if not all(isinstance(value, str) for value in (one.name, one.metric, one.split)):
        raise UserError("expected texts as name, metric and split")
    if len(one.rows) not in (2, 4):
        raise UserError(f"{len(one.rows)} rows, expected 2 or 4 names")
    side, _ = read_prediction(one.prediction)
    if one.margin is None:
        return
    if side != "=":
        raise UserError(f"a margin with the prediction {one.prediction!r}, expected '= 0'")
    if isinstance(one.margin, bool) or not isinstance(one.margin, (int, float)) or not 0 < one.margin < math.inf:
        raise UserError(f"margin is {one.margin!r}, expected a number above 0")


def compare_planned(
    lines: list[dict], named: Iterable[Plan], *, draws: int = statistics.DRAWS
) -> list[PredictedContrast]:
    """Return the planned contrasts in their order; without a comparison if a row has no runs, or there is no common seed.

    Raises:
        UserError: see :func:`~fairseq_lowrank.records.statistics.paired_differences`.
    """
    run = {line["row"] for line in lines}
    result = []
    for one in named:
        chosen = [line for line in lines if (line["metric"], line.get("split")) == (one.metric, one.split)]
        seeds = {row: {line["seed"] for line in chosen if line["row"] == row} for row in one.rows}
        if missing := [row for row in seeds if not seeds[row]]:
            states = {"not run yet": [row for row in missing if row not in run]}
            states[f"run, without {one.metric} of {one.split}"] = [row for row in missing if row in run]
            notes = tuple(f"{state}: {', '.join(rows)}" for state, rows in states.items() if rows)
        elif not set.intersection(*seeds.values()):
            shown = "; ".join(f"{row}: {', '.join(map(str, sorted(found)))}" for row, found in seeds.items())
            notes = (f"no common seed ({shown})",)
        else:
            notes = ()
        if notes:
            contrast = Contrast("", one.metric, tuple(one.rows), one.metric, None, notes)
        else:
            pairs, interactions = ([one.rows], []) if len(one.rows) == 2 else ([], [one.rows])
            [contrast] = contrasts.compare_rows(chosen, pairs, interactions, draws=draws)
            notes = contrast.notes
            if read_prediction(one.prediction)[0] == "=" and one.margin is None:
                notes = (*notes, "no margin was stated, so equality cannot be shown")
        found = {field.name: getattr(contrast, field.name) for field in dataclasses.fields(contrast)}
        found |= {"name": f"{one.name}, {one.split}", "notes": notes}
        result.append(PredictedContrast(**found, prediction=one.prediction, margin=one.margin))
    return result


def as_rows(found: Sequence[PredictedContrast]) -> list[dict]:
    """Return the rows of :func:`~fairseq_lowrank.records.contrasts.as_rows`, with predictions and outcomes."""
    names = ("prediction", "margin", "equivalence_p", "outcome")
    return [
        row | {name: getattr(one, name) for name in names}
        for row, one in zip(contrasts.as_rows(found), found, strict=True)
    ]


COLUMNS = {
    "predicted": lambda row: row["prediction"] + ("" if row["margin"] is None else f" ± {row['margin']:g}"),
    "outcome": lambda row: row["outcome"] or "–",
    "p (within margin)": lambda row: compare.format_p(row["equivalence_p"]),
}
"""The columns of a table that has predictions."""


def verdict(row: dict) -> str:
    """Return the outcome of a row of :func:`as_rows`, the better side and the number of seeds, in words."""
    return "; ".join(filter(None, (row["outcome"], compare.verdict(row))))


def plot_planned(rows: Sequence[dict]):
    """Return the figure of :func:`~fairseq_lowrank.cli.compare.plot_contrasts`, with colours of outcomes.

    A grey band is the margin within which a difference counts as 0.
    """
    outcomes = {row["outcome"] for row in rows if row["mean"] is not None}
    legend = "".join(f"; {colour}: {outcome}" for outcome, colour in COLOUR_NAMES.items() if outcome in outcomes)
    legend += "; grey band: stated margin" if any(row["margin"] is not None for row in rows) else ""
    figure = compare.plot_contrasts(rows, verdict, lambda row: OUTCOME_COLOURS[row["outcome"]], legend)
    [axes] = figure.axes
    for place, row in enumerate(rows):
        if row["mean"] is not None and row["margin"] is not None:
            axes.fill_betweenx([place - 0.35, place + 0.35], -row["margin"], row["margin"], color="0.85")
    return figure
