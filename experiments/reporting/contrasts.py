"""Contrasts between rows of results files, for :mod:`~experiments.reporting.statistics`."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from experiments.recipes.results import origins, read_results, results_files
from experiments.reporting import statistics

KEY = ("paper", "table", "metric", "split")


@dataclass(frozen=True)
class Contrast:
    """A named contrast, what it is a difference of, what it is worth, and what to know before believing it."""

    name: str
    unit: str
    comparison: statistics.Comparison | None
    notes: tuple[str, ...]


def load(paths: Iterable[Path], wanted: Mapping[str, str]) -> list[dict]:
    """The lines of ``.jsonl`` files, or of those in folders, whose fields are as ``wanted``; trials (smoke) are left out.

    Raises:
        ValueError: a path that is not there, holds no such file, or a line that is no result.
    """
    lines = []
    for file in results_files(paths):
        lines += read_results(file, measurements=True)
    lines = [line for line in lines if not line["smoke"]]
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
        ValueError: no such row, lines of several papers, tables, metrics or splits, or a logarithm of what is not above 0.
    """
    chosen = [line for line in lines if line["row"] == row]
    if not chosen:
        known = ", ".join(sorted({line["row"] for line in lines})[:20]) or "none"
        raise ValueError(f"row {row!r}: no line has it; rows there are: {known}")
    for name in KEY:
        if len(values := {str(line.get(name)) for line in chosen}) > 1:
            raise ValueError(
                f"row {row!r} has lines of several {name}s: choose one with --{name} {'|'.join(sorted(values))}"
            )
    found = {line["seed"]: np.atleast_1d(line.get("sentence_values", line["value"])) for line in chosen}
    if logarithm:
        if any((values <= 0).any() for values in found.values()):
            raise ValueError(f"row {row!r}: --logarithm needs values above 0")
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
        ValueError: rows have scores of other sentences, or see :func:`scores` and
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
            raise ValueError(f"{name}: {error}") from error
        metrics = sorted({str(line["metric"]) for line in lines if line["row"] in rows})
        unit = ("logarithm of " if logarithm else "") + ", ".join(metrics)
        return Contrast(name, unit, comparison, _notes(lines, rows))

    return [
        *(contrast(" − ".join(rows), rows) for rows in pairs),
        *(contrast("({} − {}) − ({} − {})".format(*rows), rows) for rows in interactions),
    ]


@dataclass(frozen=True)
class Named:
    """A contrast that was named, and its outcome foretold, before the runs: A − B, or (A − B) − (C − D)."""

    name: str
    rows: tuple[str, ...]
    metric: str
    split: str
    prediction: str


def read_named(path: Path, table: str) -> list[Named]:
    """The contrasts that a JSON file names for a table: ``{TABLE: [{"name", "rows", "metric", "split", "prediction"}, …]}``.

    Raises:
        ValueError: no such file or table, or an entry that is no contrast.
    """
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--contrasts {path}: {error}; expected a JSON file") from error
    if not isinstance(tables, dict) or not isinstance(tables.get(table), list):
        known = ", ".join(tables) if isinstance(tables, dict) else "none"
        raise ValueError(f"--contrasts {path}: no contrasts for table {table!r}; expected one of {known}")
    found = []
    for entry in tables[table]:
        try:
            one = Named(**entry)
            complete = all(isinstance(value, str) for value in (one.name, one.metric, one.split, one.prediction))
            if not complete or len(one.rows) not in (2, 4):
                raise ValueError("rows are 2 or 4 names")
        except (TypeError, ValueError) as error:
            fields = ", ".join(field.name for field in dataclasses.fields(Named))
            text = json.dumps(entry, ensure_ascii=False)[:60]
            raise ValueError(f"--contrasts {path}: {text} is no contrast ({error}); expected {fields}") from error
        found.append(one)
    return found


def of_named(lines: list[dict], named: Iterable[Named], *, draws: int = statistics.DRAWS) -> list[Contrast]:
    """The named contrasts, in their order; one whose rows were not all run, or under no common seed, stands there without a comparison.

    Raises:
        ValueError: see :func:`~experiments.reporting.statistics.differences`.
    """
    run, result = {line["row"] for line in lines}, []
    for one in named:
        chosen = [line for line in lines if (line["metric"], line["split"]) == (one.metric, one.split)]
        name = f"{one.name}, {one.split} ({one.prediction})"
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
            result.append(Contrast(name, one.metric, None, notes))
            continue
        rows = [[one.rows], []] if len(one.rows) == 2 else [[], [one.rows]]
        [contrast] = between(chosen, *rows, draws=draws)
        result.append(dataclasses.replace(contrast, name=name))
    return result


def _check_sentences(lines: list[dict], rows: Sequence[str]) -> None:
    """Lines say of what corpus they are since they do; older ones are of one where they are of one table."""
    chosen = [line for line in lines if line["row"] in rows and "sentence_values" in line]
    names = ("corpus", "split") if all("corpus" in line for line in chosen) else ("paper", "table", "split")
    for name in names:
        if len(values := {str(line.get(name)) for line in chosen}) > 1:
            raise ValueError(
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
    trained_on = [machine.get("gpus") or [machine["cpu"]] for machine in machines if isinstance(machine, dict)]
    return {" + ".join(sorted(set(names))) for names in trained_on}


def as_rows(contrasts: Sequence[Contrast]) -> list[dict]:
    """A flat row a contrast, with Holm's correction over all of them, those without a p among them."""
    comparisons = [contrast.comparison for contrast in contrasts]
    bootstrap = statistics.holm([comparison and comparison.bootstrap_p for comparison in comparisons])
    student = statistics.holm([comparison and comparison.t_p for comparison in comparisons])
    return [
        {
            "contrast": contrast.name,
            "unit": contrast.unit,
            **_values(contrast.comparison),
            "bootstrap_holm": holm_bootstrap,
            "t_holm": holm_student,
            "notes": contrast.notes,
        }
        for contrast, holm_bootstrap, holm_student in zip(contrasts, bootstrap, student, strict=True)
    ]


def _values(comparison: statistics.Comparison | None) -> dict:
    if comparison is None:
        return dict.fromkeys(field.name for field in dataclasses.fields(statistics.Comparison))
    # JSON has no infinity: the differences of all seeds are one number
    infinite = comparison.t is not None and math.isinf(comparison.t)
    return asdict(comparison) | ({"t": None} if infinite else {})


def draw(rows: Sequence[dict]):
    """Each of :func:`as_rows` as a line: its 95 % interval, its mean, and hollow the mean of each seed; 0 is no difference."""
    from fairseq_lowrank.tools import pictures

    names = [row["contrast"] if row["mean"] is not None else f"{row['contrast']}: no result yet" for row in rows]
    names = [textwrap.fill(pictures.plain(name), 60) for name in names]
    lines = sum(1 + name.count("\n") for name in names)
    figure, axes = pictures.new_figure(8.0, 0.9 + 0.18 * len(rows) + 0.16 * lines)
    for place, row in enumerate(rows):
        if row["mean"] is None:
            continue
        if row["low"] is not None:
            axes.plot([row["low"], row["high"]], [place, place], "-", color="#1f77b4", linewidth=2)
        axes.plot(row["seed_means"], [place] * row["seeds"], "o", color="#1f77b4", fillstyle="none", markersize=5)
        axes.plot([row["mean"]], [place], "D", color="#1f77b4", markersize=6)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    units = pictures.plain(", ".join(dict.fromkeys(row["unit"] for row in rows)))
    figure.supxlabel(f"difference in {units} (diamond: mean, bar: 95 % interval, circles: seeds)", fontsize=9)
    return figure
