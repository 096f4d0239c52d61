"""Contrasts between rows of results files, for :mod:`~fairseq_lowrank.records.statistics`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_lowrank.messages import UserError, did_you_mean
from fairseq_lowrank.records import statistics
from fairseq_lowrank.records.lines import changed_data, family, listed, lower_is_better, scores_of, untrained, way_of
from fairseq_lowrank.records.results import origins, read_results, results_files
from fairseq_lowrank.records.sentences import VALUES

KEY = ("paper", "table", "metric", "split")


@dataclass(frozen=True)
class Contrast:
    """A contrast A − B, or (A − B) − (C − D), and its result.

    Args:
        name: the name of the contrast.
        unit: the unit of the difference: the metric, or its logarithm.
        rows: A and B, or A to D.
        metric: the metric of the rows.
        comparison: the result.
        notes: reasons to be careful with the result.
        resolution: the least step of the scores, see :func:`~fairseq_lowrank.records.statistics.student`.
        splits: the corpora and splits of the scores, such as "multi30k test".
        seeds: the seeds that all rows have.
    """

    name: str
    unit: str
    rows: tuple[str, ...]
    metric: str
    comparison: statistics.Comparison
    notes: tuple[str, ...]
    resolution: float = 0.0
    splits: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()

    @property
    def better(self) -> str | None:
        """Return the better row if the interval does not contain 0, else None.

        For an interaction, return the pair with the larger lead, as "A over B".
        """
        low, high = self.comparison.low, self.comparison.high
        if low is None or high is None or low <= 0 <= high:
            return None
        above = low > 0
        if len(self.rows) == 2:
            return self.rows[above == lower_is_better(self.metric)]
        leads = [pair[::-1] if lower_is_better(self.metric) else pair for pair in (self.rows[:2], self.rows[2:])]
        return " over ".join(leads[0 if above else 1])


def load(paths: Iterable[Path]) -> list[dict]:
    """Read the lines of ``.jsonl`` files, or of those in folders; smoke runs are left out.

    A line needs ``row``, ``seed``, ``metric`` and ``value``, and ``sentence_values`` or ``sentence_counts`` for a test over
    sentences. A line with further scores, such as a validation loss, becomes one line for each, marked as ``further``.

    Raises:
        UserError: a path does not exist, or a folder has no such file.
    """
    lines = []
    for file in results_files(paths):
        lines += read_results(file, scores=True, sentences=True)
    return [one for line in lines if not line.get("smoke") for one in (line, *_further_scores(line))]


def _further_scores(line: dict) -> list[dict]:
    """Return the other scores of a line as lines; those that do not depend on decoding have no `scoring`, its flags."""
    own = {"sentences", *VALUES, "losses"}
    kept = {name: value for name, value in line.items() if name not in own}
    found = []
    for (metric, split), value in scores_of({"split": None} | line).items():
        if (metric, split) == (line["metric"], line.get("split")):
            continue
        one = {**kept, "metric": metric, "split": split, "value": value, "further": True}
        loss = line.get("losses", {}).get(split, {})
        if metric == "bits" and "sentence_values" in loss:
            one["sentence_values"] = loss["sentence_values"]
        if family(metric) != "bleu":
            one.pop("scoring", None)
        found.append(one)
    return found


def select(lines: list[dict], wanted: Mapping[str, str], rows: Iterable[str]) -> list[dict]:
    """Return the lines whose fields equal ``wanted``. Without a metric or split in it, further scores are left out.

    Raises:
        UserError: there are no lines, or one of the rows has no such line.
    """
    if not lines:
        raise UserError(
            "nothing to compare: the results have no lines, or only those of trials (SMOKE=1). Give results of full runs."
        )
    further = "metric" in wanted or "split" in wanted
    chosen = [
        line
        for line in lines
        if all(line.get(name) == value for name, value in wanted.items()) and (further or not line.get("further"))
    ]
    for row in dict.fromkeys(rows):
        if any(line["row"] == row for line in chosen):
            continue
        if not any(line["row"] == row for line in lines):
            raise _no_such_row(lines, row)
        asked = " ".join(f"--{name} {value}" for name, value in wanted.items())
        fields = [name for name in ("paper", "table") if name in wanted] + ["metric", "split"]
        there = {
            " ".join(f"--{name} {line[name]}" for name in fields if line.get(name) is not None)
            for line in lines
            if line["row"] == row
        }
        raise UserError(f"row {row!r}: no line of this row has {asked}. Choose from: {listed(sorted(there))}.")
    return chosen


def _no_such_row(lines: list[dict], row: str) -> UserError:
    known = sorted({line["row"] for line in lines})
    return UserError(f"row {row!r}: no line has this row. Choose from {listed(known)}.{did_you_mean(row, known)}")


def scores(
    lines: list[dict], row: str, *, logarithm: bool = False, field: str = "sentence_values"
) -> dict[int, np.ndarray]:
    """Return a row's scores by seed; of lines with the same seed, the last one is used.

    Args:
        field: the values of sentences that are used if lines have them.

    Raises:
        UserError: there is no such row, its lines have several papers, tables, metrics or splits, or a value for a logarithm is
            not above 0.
    """
    chosen = [line for line in lines if line["row"] == row]
    if not chosen:
        raise _no_such_row(lines, row)
    for name in KEY:
        if len(values := {str(line.get(name)) for line in chosen}) > 1:
            raise UserError(
                f"row {row!r}: its lines have several {name}s. Choose one with --{name} {'|'.join(sorted(values))}."
            )
    found = {line["seed"]: np.atleast_1d(line.get(field, line["value"])) for line in chosen}
    if logarithm:
        if any((values <= 0).any() for values in found.values()):
            raise UserError(f"row {row!r}: --logarithm needs values above 0. Remove the flag.")
        found = {seed: np.log(values) for seed, values in found.items()}
    return found


def resolution_of(lines: Iterable[dict], *, logarithm: bool = False) -> float:
    """Return the last decimal place of the lines' values, such as 0.01; of their logarithms, the greatest step."""
    values = [line["value"] for line in lines]
    exponents = [int(Decimal(repr(value)).normalize().as_tuple().exponent) for value in values]
    step = 10.0 ** min(0, *exponents, 0)
    return step / min(values) if logarithm else step


def _is_mean_of_sentences(line: dict) -> bool:
    """Return True if a line's score is the mean over its sentences up to rounding, or has no values of sentences."""
    mean = float(np.mean(line.get("sentence_values", line["value"])))
    return math.isclose(mean, line["value"], rel_tol=0.01, abs_tol=resolution_of([line]))


def _step_of_mean(values: np.ndarray) -> float:
    """Return the least change of a mean over sentences if one of them gets the value of another one."""
    return float(np.diff(np.unique(values.astype(float))).min(initial=math.inf)) / len(values)


def compare_rows(
    lines: list[dict],
    pairs: Iterable[Sequence[str]],
    interactions: Iterable[Sequence[str]] = (),
    *,
    logarithm: bool = False,
    draws: int = statistics.DRAWS,
) -> list[Contrast]:
    """Return A − B for each pair and (A − B) − (C − D) for each interaction, in this order.

    Raises:
        UserError: rows have scores of different sentences or units; see also :func:`scores` and
            :func:`~fairseq_lowrank.records.statistics.paired_differences`.
    """

    options: dict[str, Any] = {"logarithm": logarithm, "draws": draws}
    return [
        *(_contrast(lines, " − ".join(rows), rows, **options) for rows in pairs),
        *(_contrast(lines, "({} − {}) − ({} − {})".format(*rows), rows, **options) for rows in interactions),
    ]


def _contrast(lines: list[dict], name: str, rows: Sequence[str], *, logarithm: bool, draws: int) -> Contrast:
    """Return the contrast of two rows, or of two pairs."""
    chosen = _latest(lines, rows)
    having = [any(name in line for name in VALUES) for line in chosen]
    field = "sentence_values" if all(having) else "value"
    values = [scores(lines, row, logarithm=logarithm, field=field) for row in rows]
    _check_sentences(lines, rows)
    _check_units(chosen, rows)
    counted = all("sentence_counts" in line for line in chosen)
    steps = [_step_of_mean(found) for row in values for found in row.values()]
    resolution = min(resolution_of(chosen, logarithm=logarithm), *steps)
    try:
        if counted:
            counts = [scores(lines, row, field="sentence_counts") for row in rows]
            _check_references(counts)
            measure = (lambda sums: np.log(statistics.bleu(sums))) if logarithm else statistics.bleu
            comparison = statistics.compare_counts(counts, measure, resolution=resolution, draws=draws)
        elif len(rows) == 2:
            comparison = statistics.compare(values[0], values[1], resolution=resolution, draws=draws)
        else:
            first, second = (values[0], values[1]), (values[2], values[3])
            comparison = statistics.compare_interaction(first, second, resolution=resolution, draws=draws)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    metrics = sorted({str(line["metric"]) for line in lines if line["row"] in rows})
    unit = ("logarithm of " if logarithm else "") + ", ".join(metrics)
    notes = [*untrained(chosen), *_notes(lines, rows)]
    if untrained(chosen):
        nothing: dict[str, Any] = dict.fromkeys(statistics.VERDICTS)
        comparison = dataclasses.replace(comparison, **nothing)
    if field == "sentence_values" and not all(map(_is_mean_of_sentences, chosen)):
        notes.append("the means over sentences differ from the scores of the lines; the means are compared")
    if any(having) and not all(having):
        notes.append("not all lines have values of sentences, so tests over sentences are left out")
    if comparison.seeds > 1 and statistics.equal_after_rounding(comparison.seed_means, resolution):
        notes.append(
            f"the differences of all seeds are equal after rounding, so their spread is unknown: the standard error is set "
            f"to {resolution:.2g}, the least step of the scores"
        )
    return Contrast(
        name,
        unit,
        tuple(rows),
        metrics[0],
        comparison,
        tuple(notes),
        resolution=resolution,
        splits=tuple(dict.fromkeys(_split_name(line) for line in chosen)),
        seeds=tuple(sorted(set.intersection(*(set(row) for row in values)))),
    )


def _latest(lines: list[dict], rows: Sequence[str]) -> list[dict]:
    """Return the last line of each row and seed."""
    return list({(line["row"], line["seed"]): line for line in lines if line["row"] in rows}.values())


def _split_name(line: dict) -> str:
    """Return the corpus and the split of a line, if they are known."""
    return " ".join(str(line[name]) for name in ("corpus", "split") if line.get(name) is not None)


def _check_sentences(lines: list[dict], rows: Sequence[str]) -> None:
    """Refuse rows with different sentences, by the corpus in their lines; older lines have no corpus, so by their table."""
    chosen = [line for line in lines if line["row"] in rows and any(name in line for name in VALUES)]
    names = ("corpus", "split") if all("corpus" in line for line in chosen) else ("paper", "table", "split")
    for name in names:
        if len(values := {str(line.get(name)) for line in chosen}) > 1:
            raise UserError(
                f"{' and '.join(dict.fromkeys(rows))}: their sentences differ in {name} ({', '.join(sorted(values))}), so they "
                "cannot be paired. Choose rows of one corpus."
            )


def _check_references(counts: Sequence[Mapping[int, np.ndarray]]) -> None:
    """Refuse BLEU's counts whose sentences have references of different lengths: their rows were scored on different data."""
    found = [row[seed] for row in counts for seed in set.intersection(*map(set, counts))]
    if any(one.shape == found[0].shape and (one[:, 1] != found[0][:, 1]).any() for one in found):
        raise UserError(
            "the references of their sentences have different lengths, so they cannot be paired. Score all rows on the same data."
        )


def _check_units(chosen: list[dict], rows: Sequence[str]) -> None:
    """Refuse scores of different metrics, BLEU by different signatures, and BLEU on tokens against BLEU on raw text."""
    for name in ("metric", "signature", "text"):
        found = (line["metric"] if name == "metric" else way_of(line).get(name) for line in chosen)
        if len(values := {value for value in found if value is not None}) > 1:
            raise UserError(
                f"{' and '.join(dict.fromkeys(rows))}: their scores have different units, because they differ in {name} "
                f"({'; '.join(sorted(values))}). Choose scores of one kind, or score both in the same way."
            )


def _notes(lines: list[dict], rows: Sequence[str]) -> tuple[str, ...]:
    every = [line for line in lines if line["row"] in rows]
    chosen = _latest(lines, rows)
    notes = []
    if older := len(every) - len(chosen):
        notes.append(f"of lines of one row and seed, only the last is used: {older} left out")
    for name in ("paper", "table", "corpus", "split", "updates"):
        # older lines do not have every field
        if len(values := {str(line[name]) for line in chosen if line.get(name) is not None}) > 1:
            notes.append(f"rows differ in {name}: {', '.join(sorted(values))}")
    notes += changed_data(chosen)
    if len(tokens := {way["tokens"] for way in map(way_of, chosen) if "tokens" in way}) > 1:
        notes.append(
            f"rows were scored on different numbers of tokens, so their units may differ: {', '.join(sorted(tokens))}"
        )
    if (
        len(
            signatures := {
                str(line["signature"]) for line in chosen if "signature" in way_of(line) and "signature" in line
            }
        )
        > 1
    ):
        notes.append(f"lines have several versions of sacrebleu: {'; '.join(sorted(signatures))}")
    # older lines have no flags of scoring
    if len(ways := {line["scoring"] or "no flags" for line in chosen if "scoring" in line}) > 1:
        notes.append(f"lines were scored in different ways: {'; '.join(sorted(ways))}")
    made: dict[str, set[str]] = {}
    for line in chosen:
        if "patches" in line:  # older lines do not have them
            names = " ".join(line["patches"].values()) or "none"
            made.setdefault(names, set()).add(f"{line['row']} (seed {line['seed']})")
    if len(made) > 1:
        groups = (f"{names}: {', '.join(sorted(found))}" for names, found in sorted(made.items()))
        notes.append(f"lines were made with different patches of fairseq: {'; '.join(groups)}")
    commits = {str(origin.get("commit") or "unknown") for line in chosen for origin in origins(line)}
    if len(commits) > 1:
        notes.append(f"lines of several commits: {', '.join(sorted(commit[:10] for commit in commits))}")
    seeds = [{line["seed"] for line in chosen if line["row"] == row} for row in rows]
    if apart := [seed for seed in sorted(set.intersection(*seeds)) if len(_processors(chosen, seed)) > 1]:
        notes.append(
            f"rows of one seed were run on several processors, which round differently: seed {', '.join(map(str, apart))}"
            f" ({', '.join(sorted(set.union(*(_processors(chosen, seed) for seed in apart))))})"
        )
    if left_out := set.union(*seeds) - set.intersection(*seeds):
        notes.append(f"seeds without a run of every row are left out: {', '.join(map(str, sorted(left_out)))}")
    if len(set.intersection(*seeds)) == 1:
        notes.append("one seed: other seeds may differ")
    return tuple(notes)


def _processors(lines: Iterable[dict], seed: int) -> set[str]:
    machines = [origin.get("machine") for line in lines if line["seed"] == seed for origin in origins(line)]
    trained_on = [machine.get("gpus") or [str(machine.get("cpu"))] for machine in machines if isinstance(machine, dict)]
    return {" + ".join(sorted(set(names))) for names in trained_on}


def as_rows(contrasts: Sequence[Contrast]) -> list[dict]:
    """Return a flat row for each contrast, with Holm's correction over all of them."""
    corrected = statistics.holm([contrast.comparison.t_p for contrast in contrasts])
    return [
        {
            "contrast": contrast.name,
            "unit": contrast.unit,
            "rows": contrast.rows,
            "lower_is_better": lower_is_better(contrast.metric),
            "splits": contrast.splits,
            "seed_numbers": contrast.seeds,
            **_values(contrast.comparison),
            "t_holm": holm,
            "better": contrast.better,
            "notes": contrast.notes,
        }
        for contrast, holm in zip(contrasts, corrected, strict=True)
    ]


def _values(comparison: statistics.Comparison) -> dict:
    # JSON has no infinity, the t of equal differences for all seeds
    infinite = comparison.t is not None and math.isinf(comparison.t)
    return asdict(comparison) | ({"t": None} if infinite else {})
