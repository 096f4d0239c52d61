"""Contrasts between rows of results files, for :mod:`~experiments.reporting.statistics`."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from experiments.recipes.results import origins, read_results, results_files
from experiments.reporting import statistics
from experiments.reporting.comparison import lower_is_better
from fairseq_lowrank.messages import UserError

KEY = ("paper", "table", "metric", "split")


SIDES = {">": ">", "at least": ">", "<": "<", "at most": "<", "=": "="}
HELD, CONTRADICTED, UNCLEAR = "held", "contradicted", "unclear"
# A claim of equality is made where the two one-sided tests have a p below this.
EQUIVALENCE_LEVEL = 0.05


@dataclass(frozen=True)
class Contrast:
    """A contrast A − B, or (A − B) − (C − D), and its result.

    Args:
        name: of the contrast.
        unit: of the difference: the metric, or its logarithm.
        rows: A and B, or A to D.
        metric: what the rows are scored by.
        comparison: the result; ``None`` before the rows were run.
        notes: what to know before believing it.
        prediction: what was predicted before the runs, see :func:`read_prediction`.
        margin: how far from an equality, such as "= 0", a difference still counts as equal.
    """

    name: str
    unit: str
    rows: tuple[str, ...]
    metric: str
    comparison: statistics.Comparison | None
    notes: tuple[str, ...]
    prediction: str | None = None
    margin: float | None = None

    @property
    def equivalence_p(self) -> float | None:
        """The p of the test that the difference lies within the margin."""
        if self.margin is None or self.comparison is None:
            return None
        _, value = read_prediction(self.prediction)
        return statistics.equivalence_p([mean - value for mean in self.comparison.seed_means], self.margin)

    @property
    def outcome(self) -> str | None:
        """Whether the prediction held, by the 95 % interval of Student's t over seeds, or by the test of equivalence.

        It is contradicted where the whole interval lies on the other side (of an equality: outside the margin), else unclear.
        """
        if self.prediction is None or self.comparison is None:
            return None
        if self.comparison.low is None:
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

    @property
    def better(self) -> str | None:
        """The row that is better, where the interval leaves no doubt of the sign.

        Of an interaction it is the pair with the larger lead, as "A over B".
        """
        low, high = (self.comparison.low, self.comparison.high) if self.comparison else (None, None)
        if low is None or low <= 0 <= high:
            return None
        above = low > 0
        if len(self.rows) == 2:
            return self.rows[above == lower_is_better(self.metric)]
        leads = [pair[::-1] if lower_is_better(self.metric) else pair for pair in (self.rows[:2], self.rows[2:])]
        return " over ".join(leads[0 if above else 1])


def load(paths: Iterable[Path], wanted: Mapping[str, str]) -> list[dict]:
    """Read the lines of ``.jsonl`` files, or of those in folders, whose fields are as ``wanted``; trials (smoke) are left out.

    A line needs ``row``, ``seed``, ``metric`` and ``value``, and ``sentence_values`` for a test over sentences.

    Raises:
        UserError: a path that does not exist or holds no such file.
    """
    lines = []
    for file in results_files(paths):
        lines += read_results(file, scores=True)
    lines = [line for line in lines if not line.get("smoke")]
    lines = [one for line in lines for one in (line, *_losses(line))]
    return [line for line in lines if all(line.get(name) == value for name, value in wanted.items())]


def _losses(line: dict) -> list[dict]:
    """A training's losses a sentence, on training pairs (`fit`), the validation and the test set, as lines of metric `bits`.

    They do not depend on how the model was made to translate, which is what `scoring` says.
    """
    kept = {name: value for name, value in line.items() if name != "scoring"}
    return [
        {**kept, "metric": "bits", "split": split, "value": found["bits"], "sentence_values": found["sentence_values"]}
        for split, found in line.get("losses", {}).items()
    ]


def scores(lines: list[dict], row: str, *, logarithm: bool = False) -> dict[int, np.ndarray]:
    """A row's scores by seed; of lines of the same seed the last one counts.

    Raises:
        UserError: no such row, lines of several papers, tables, metrics or splits, or a logarithm of what is not above 0.
    """
    chosen = [line for line in lines if line["row"] == row]
    if not chosen:
        known = ", ".join(sorted({line["row"] for line in lines})[:20]) or "none"
        raise UserError(f"row {row!r}: no line has it; rows there are: {known}")
    for name in KEY:
        if len(values := {str(line.get(name)) for line in chosen}) > 1:
            raise UserError(
                f"row {row!r} has lines of several {name}s: choose one with --{name} {'|'.join(sorted(values))}"
            )
    found = {line["seed"]: np.atleast_1d(line.get("sentence_values", line["value"])) for line in chosen}
    if logarithm:
        if any((values <= 0).any() for values in found.values()):
            raise UserError(f"row {row!r}: --logarithm needs values above 0")
        found = {seed: np.log(values) for seed, values in found.items()}
    return found


def between(
    lines: list[dict],
    pairs: Iterable[Sequence[str]],
    interactions: Iterable[Sequence[str]] = (),
    *,
    logarithm: bool = False,
    draws: int = statistics.DRAWS,
) -> list[Contrast]:
    """A − B for each pair and (A − B) − (C − D) for each interaction, in this order.

    Raises:
        UserError: rows have scores of other sentences, or see :func:`scores` and
            :func:`~experiments.reporting.statistics.differences`.
    """

    def contrast(name: str, rows: Sequence[str]) -> Contrast:
        found = [scores(lines, row, logarithm=logarithm) for row in rows]
        _check_sentences(lines, rows)
        try:
            if len(rows) == 2:
                comparison = statistics.compare(*found, draws=draws)
            else:
                comparison = statistics.compare_interaction(found[:2], found[2:], draws=draws)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from error
        metrics = sorted({str(line["metric"]) for line in lines if line["row"] in rows})
        unit = ("logarithm of " if logarithm else "") + ", ".join(metrics)
        return Contrast(name, unit, tuple(rows), metrics[0], comparison, _notes(lines, rows))

    return [
        *(contrast(" − ".join(rows), rows) for rows in pairs),
        *(contrast("({} − {}) − ({} − {})".format(*rows), rows) for rows in interactions),
    ]


@dataclass(frozen=True)
class Named:
    """A contrast that was named and predicted before the runs: A − B, or (A − B) − (C − D).

    Args:
        margin: with the prediction "= 0", how far from 0 a difference still counts as none.
    """

    name: str
    rows: tuple[str, ...]
    metric: str
    split: str
    prediction: str
    margin: float | None = None


def read_named(path: Path, table: str) -> list[Named]:
    """Read the contrasts that a JSON file names for a table: ``{TABLE: [{"name", "rows", "metric", "split", "prediction"}, …]}``.

    Where "= 0" is predicted, an entry may give its ``margin``.

    Raises:
        UserError: no such file or table, or an entry that is not a contrast.
    """
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--contrasts {path}: {error}; expected a JSON file") from error
    if not isinstance(tables, dict) or not isinstance(tables.get(table), list):
        known = ", ".join(tables) if isinstance(tables, dict) else "none"
        raise UserError(f"--contrasts {path}: no contrasts for table {table!r}; expected one of {known}")
    found = []
    for entry in tables[table]:
        try:
            one = Named(**entry)
            _check_named(one)
        except (TypeError, ValueError) as error:
            fields = ", ".join(field.name for field in dataclasses.fields(Named))
            text = json.dumps(entry, ensure_ascii=False)[:60]
            raise UserError(f"--contrasts {path}: {text} is not a contrast ({error}); expected {fields}") from error
        found.append(one)
    return found


def read_prediction(text: str) -> tuple[str, float]:
    """Read "> 0", "< 0.1", "= 0", "at least 0.1" or "at most 0.1": the side (``>``, ``<`` or ``=``) and the number.

    Raises:
        UserError: another text.
    """
    match = re.fullmatch(rf"({'|'.join(SIDES)}) (-?\d+(?:\.\d+)?)", text) if isinstance(text, str) else None
    if match is None:
        raise UserError(f"prediction is {', '.join(SIDES)}, each with a number")
    return SIDES[match[1]], float(match[2])


def _check_named(one: Named) -> None:
    """Raise UserError, saying what is wrong, unless a contrast is complete."""
    if not all(isinstance(value, str) for value in (one.name, one.metric, one.split)):
        raise UserError("name, metric and split are texts")
    if len(one.rows) not in (2, 4):
        raise UserError("rows are 2 or 4 names")
    side, _ = read_prediction(one.prediction)
    if one.margin is None:
        return
    if side != "=":
        raise UserError("a margin works only with the prediction '= 0'")
    if isinstance(one.margin, bool) or not isinstance(one.margin, (int, float)) or not 0 < one.margin < math.inf:
        raise UserError("margin is a number above 0")


def of_named(lines: list[dict], named: Iterable[Named], *, draws: int = statistics.DRAWS) -> list[Contrast]:
    """The named contrasts, in their order; one whose rows were not all run, or under no common seed, stands there without a comparison.

    Raises:
        UserError: see :func:`~experiments.reporting.statistics.differences`.
    """
    run, result = {line["row"] for line in lines}, []
    for one in named:
        chosen = [line for line in lines if (line["metric"], line["split"]) == (one.metric, one.split)]
        planned = {"name": f"{one.name}, {one.split}", "prediction": one.prediction, "margin": one.margin}
        seeds = {row: {line["seed"] for line in chosen if line["row"] == row} for row in one.rows}
        if missing := [row for row in seeds if not seeds[row]]:
            states = {"not run yet": [row for row in missing if row not in run]}
            states[f"run, without {one.metric} of {one.split}"] = [row for row in missing if row in run]
            notes = tuple(f"{state}: {', '.join(rows)}" for state, rows in states.items() if rows)
        elif not set.intersection(*seeds.values()):
            shown = "; ".join(f"{row}: {', '.join(map(str, sorted(found)))}" for row, found in seeds.items())
            notes = (f"no seed that every row has ({shown})",)
        else:
            notes = ()
        if notes:
            empty = {"unit": one.metric, "rows": tuple(one.rows), "metric": one.metric, "comparison": None}
            result.append(Contrast(**planned, **empty, notes=notes))
            continue
        rows = [[one.rows], []] if len(one.rows) == 2 else [[], [one.rows]]
        [contrast] = between(chosen, *rows, draws=draws)
        if read_prediction(one.prediction)[0] == "=" and one.margin is None:
            planned["notes"] = (*contrast.notes, "no margin was stated, so equality cannot be shown")
        result.append(dataclasses.replace(contrast, **planned))
    return result


def _check_sentences(lines: list[dict], rows: Sequence[str]) -> None:
    """Lines say of what corpus they are since they do; older ones are of one where they are of one table."""
    chosen = [line for line in lines if line["row"] in rows and "sentence_values" in line]
    names = ("corpus", "split") if all("corpus" in line for line in chosen) else ("paper", "table", "split")
    for name in names:
        if len(values := {str(line.get(name)) for line in chosen}) > 1:
            raise UserError(
                f"{' and '.join(dict.fromkeys(rows))}: their sentences differ in {name} ({', '.join(sorted(values))}) and "
                "cannot be paired"
            )


def _notes(lines: list[dict], rows: Sequence[str]) -> tuple[str, ...]:
    every = [line for line in lines if line["row"] in rows]
    chosen = list({(line["row"], line["seed"]): line for line in every}.values())
    notes = []
    if older := len(every) - len(chosen):
        notes.append(f"of lines of one row and seed the last counts: {older} left out")
    for name in ("metric", "paper", "table", "corpus", "split", "updates"):
        if len(values := {str(line.get(name)) for line in chosen}) > 1:
            notes.append(f"rows differ in {name}: {', '.join(sorted(values))}")
    # older lines do not say how they were scored
    if len(ways := {line["scoring"] or "no flags" for line in chosen if "scoring" in line}) > 1:
        notes.append(f"lines were scored in different ways: {'; '.join(sorted(ways))}")
    commits = {str(origin.get("commit") or "unknown") for line in chosen for origin in origins(line)}
    if len(commits) > 1:
        notes.append(f"lines of several commits: {', '.join(sorted(commit[:10] for commit in commits))}")
    seeds = [{line["seed"] for line in chosen if line["row"] == row} for row in rows]
    if apart := [seed for seed in sorted(set.intersection(*seeds)) if len(_processors(chosen, seed)) > 1]:
        notes.append(
            f"rows of one seed from several processors, which round differently: seed {', '.join(map(str, apart))}"
            f" ({', '.join(sorted(set.union(*(_processors(chosen, seed) for seed in apart))))})"
        )
    if left_out := set.union(*seeds) - set.intersection(*seeds):
        notes.append(f"seeds that not every row has are left out: {', '.join(map(str, sorted(left_out)))}")
    if len(set.intersection(*seeds)) == 1:
        notes.append("one seed: nothing is known of others")
    return tuple(notes)


def _processors(lines: Iterable[dict], seed: int) -> set[str]:
    machines = [origin.get("machine") for line in lines if line["seed"] == seed for origin in origins(line)]
    trained_on = [machine.get("gpus") or [str(machine.get("cpu"))] for machine in machines if isinstance(machine, dict)]
    return {" + ".join(sorted(set(names))) for names in trained_on}


def as_rows(contrasts: Sequence[Contrast]) -> list[dict]:
    """A flat row a contrast, with Holm's correction over all of them, those without a p among them."""
    corrected = statistics.holm([contrast.comparison and contrast.comparison.t_p for contrast in contrasts])
    return [
        {
            "contrast": contrast.name,
            "unit": contrast.unit,
            "rows": contrast.rows,
            "lower_is_better": lower_is_better(contrast.metric),
            **_values(contrast.comparison),
            "t_holm": holm,
            "better": contrast.better,
            "prediction": contrast.prediction,
            "margin": contrast.margin,
            "equivalence_p": contrast.equivalence_p,
            "outcome": contrast.outcome,
            "notes": contrast.notes,
        }
        for contrast, holm in zip(contrasts, corrected, strict=True)
    ]


def _values(comparison: statistics.Comparison | None) -> dict:
    if comparison is None:
        return dict.fromkeys(field.name for field in dataclasses.fields(statistics.Comparison))
    # JSON has no infinity: the differences of all seeds are one number
    infinite = comparison.t is not None and math.isinf(comparison.t)
    return asdict(comparison) | ({"t": None} if infinite else {})


OUTCOME_COLOURS = {HELD: "#00796b", CONTRADICTED: "#c62828", UNCLEAR: "#757575", None: "#1f4e79"}


def verdict(row: dict) -> str:
    """Return the outcome, the better side and the number of seeds of one of :func:`as_rows`, in words."""
    if row["mean"] is None:
        return "no result yet"
    better = f"{row['better']} {'better' if len(row['rows']) == 2 else 'by more'}" if row["better"] else None
    seeds = f"{row['seeds']} seed{'s' * (row['seeds'] > 1)}"
    return "; ".join(filter(None, (row["outcome"], better or "neither side clearly better", seeds)))


def draw(rows: Sequence[dict]):
    """Draw each of :func:`as_rows` as a line of one picture.

    A thin bar is the 95 % interval of Student's t, a broad one that over sentences. The diamond is the mean, circles are
    the seeds' means, and a grey band is the margin within which a difference counts as none.
    """
    from fairseq_lowrank.tools import pictures

    names = [f"{textwrap.fill(row['contrast'], 70)}\n{textwrap.fill(verdict(row), 70)}" for row in rows]
    names = [pictures.plain(name) for name in names]
    lines = sum(1 + name.count("\n") for name in names)
    figure, axes = pictures.new_figure(8.5, 1.1 + 0.12 * len(rows) + 0.17 * lines)
    for place, row in enumerate(rows):
        if row["mean"] is None:
            continue
        colour = OUTCOME_COLOURS[row["outcome"]]
        if row["margin"] is not None:
            axes.fill_betweenx([place - 0.35, place + 0.35], -row["margin"], row["margin"], color="0.85")
        if row["sentences_low"] is not None:
            over = [row["sentences_low"], row["sentences_high"]]
            axes.plot(over, [place, place], "-", color=colour, linewidth=7, alpha=0.3, solid_capstyle="butt")
        if row["low"] is not None:
            axes.plot([row["low"], row["high"]], [place, place], "-", color=colour, linewidth=1.5)
        axes.plot(row["seed_means"], [place] * row["seeds"], "o", color=colour, fillstyle="none", markersize=5)
        axes.plot([row["mean"]], [place], "D", color=colour, markersize=6)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    units = pictures.plain(", ".join(dict.fromkeys(row["unit"] for row in rows)))
    legend = "diamond: mean; circles: seeds; line: 95 % interval, t over seeds"
    legend += "; broad bar: over sentences" if any(row["sentences_low"] is not None for row in rows) else ""
    legend += "; grey: stated margin" if any(row["margin"] is not None for row in rows) else ""
    sides = {"left: A is better, right: B" if row["lower_is_better"] else "left: B is better, right: A" for row in rows}
    side = f" ({sides.pop()})" if len(sides) == 1 else ""
    figure.supxlabel(f"difference A − B in {units}{side}\n{legend}", fontsize=8)
    return figure
