"""The measurements that `advise` cites, computed again from the records of this repository."""

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import pytest

from experiments.evidence import published_models
from experiments.evidence.measure import read
from fairseq_lowrank.tools.advice import measured
from fairseq_lowrank.tools.advice.measured import HEAD_EMBEDDINGS, MEASURED, TIMES
from fairseq_lowrank.tools.measuring.verdict import TOLERANCE

ROOT = Path(__file__).resolve().parents[2]
RESULTS, BENCHMARKS = ROOT / "results", ROOT / "benchmarks" / "results"
SEEDS = (1, 2, 3)


def records(file):
    rows = defaultdict(dict)
    for line in (RESULTS / file).read_text(encoding="utf-8").splitlines():
        line = json.loads(line)
        rows[line["table"], line["row"]].setdefault(line["seed"], line)
    return rows


TRAININGS, POINTS = records("evidence.jsonl"), records("evidence-nearest-point.jsonl")


def fit(row, table="fast-start"):
    return fmean(TRAININGS[table, row][seed]["losses"]["fit"]["bits"] for seed in SEEDS)


def error(row):
    return fmean(POINTS["nearest-point", row][seed]["value"] for seed in SEEDS)


def lead(row, base):
    return fit(base) - fit(row)


def text_lead(row, base="h32-mha"):
    """The mean lead of a language model on the test set, over the seeds that both have."""
    first, second = (TRAININGS["language-model", name] for name in (base, row))
    test = [
        [lines[seed]["losses"]["test"]["bits"] for seed in first.keys() & second.keys()] for lines in (first, second)
    ]
    return fmean(test[0]) - fmean(test[1])


def accuracy_lead(task):
    rows = defaultdict(dict)
    for line in map(json.loads, (RESULTS / "evidence.jsonl").read_text(encoding="utf-8").splitlines()):
        if line["table"].startswith("published-bert") and line["metric"] == task:
            rows[line["row"]].setdefault(line["seed"], line["value"])
    return fmean(rows["mixhead-b"][seed] - rows["mha"][seed] for seed in rows["mha"])


def speeds(file):
    written = json.loads((BENCHMARKS / file).read_text(encoding="utf-8"))
    return {row["row"]: row["tokens_per_second"] for row in written["results"]}


M = measured
START, WIDER = (
    "a half-scale start (output projections initialised at half)",
    "larger heads at the same number (--attention fixedhead)",
)
PRE_NORM = "pre-norm (--encoder-normalize-before --decoder-normalize-before)"
GAIN = "a gain for each head (--attention gain --mixing-lr-scale HEADS)"
COMPUTED = {
    (M.SCORES, M.SYNTHETIC): lambda: {
        "mixed": error("h8-score-mixing"),
        "plain": error("h8-mha"),
        "after": error("h8-mixhead-a"),
    },
    (M.SCORES, M.LANGUAGE_MODEL): lambda: {
        "lead": text_lead("h32-score-mixing"),
        "control": -text_lead("h32-score-gain-x32"),
    },
    (M.FEWER, M.LANGUAGE_MODEL): lambda: {
        "lead": text_lead("h4-mha"),
        "longer": text_lead("h4-mha-6000", "h32-mha-6000"),
    },
    (M.MIXHEAD, M.LANGUAGE_MODEL): lambda: {"behind": -text_lead("h32-mixhead-a")},
    (START, M.LANGUAGE_MODEL): lambda: {"lead": text_lead("h32-small-start")},
    (GAIN, M.LANGUAGE_MODEL): lambda: {"lead": text_lead("h32-gain-x8")},
    (M.FEWER, M.TRANSLATION): lambda: {
        "lead": lead("h4-mha-2e-3", "h32-mha-2e-3"),
        "small_start": lead("h4-small-start-2e-3", "h32-small-start-2e-3"),
    },
    (WIDER, M.TRANSLATION): lambda: {
        "behind": fit("h32-fixedhead", "above-head-size") - fit("h32-mha-wide", "above-head-size")
    },
    (START, M.TRANSLATION): lambda: {
        "large": lead("h4-small-start-2e-3", "h4-mha-2e-3"),
        "small": lead("h32-small-start-2e-3", "h32-mha-2e-3"),
    },
    (PRE_NORM, M.TRANSLATION): lambda: {"lead": lead("h4-mha-pre-norm-2e-3", "h4-mha-2e-3")},
    (GAIN, M.TRANSLATION): lambda: {
        "x4": lead("h4-gain-x4-2e-3", "h4-mha-2e-3"),
        "x32": lead("h32-gain-x32-2e-3", "h32-mha-2e-3"),
        "plain": lead("h4-gain-2e-3", "h4-mha-2e-3"),
    },
    (M.MIXHEAD, M.TRANSLATION): lambda: {
        "large": lead("h4-mixhead-a-2e-3", "h4-mha-2e-3"),
        "small": lead("h32-mixhead-a-2e-3", "h32-mha-2e-3"),
        "fast": lead("h4-mixhead-a-4e-3", "h4-mha-4e-3"),
    },
    (M.MIXHEAD, M.PRE_NORM_TRANSLATION): lambda: {"lead": lead("h4-mixhead-a-pre-norm-2e-3", "h4-mha-pre-norm-2e-3")},
    (M.MIXHEAD, M.ENCODER): lambda: {"polarity": -accuracy_lead("sentence-polarity"), "rte": accuracy_lead("rte")},
}


@pytest.mark.parametrize("measurement", MEASURED, ids=lambda one: f"{one.change[:24]}, {one.applies}")
def test_measurement_has_the_numbers_of_the_records(measurement):
    computed = COMPUTED[measurement.change, measurement.applies]()
    digits = 0.006 if measurement.applies == M.ENCODER else 0.0006
    assert measurement.numbers == pytest.approx(computed, abs=digits)
    assert all(str(number) in json.dumps(measurement.as_dict()) for number in measurement.numbers.values())


def test_kinds_without_a_measurement_are_computed_from_the_table():
    by_change = {one.change: one.as_dict()["not_measured_in"] for one in MEASURED}
    assert by_change[M.SCORES] == [M.TRANSLATION, M.PRE_NORM_TRANSLATION, M.ENCODER]
    assert by_change[M.MIXHEAD] == []
    assert M.LANGUAGE_MODEL not in by_change[START]


def test_measurements_are_those_of_the_kind():
    for kind in M.KINDS:
        found = M.measured_in(kind)
        assert {one.applies for one in found} <= {kind, M.SYNTHETIC}
        assert len({one.change for one in found}) == len(found)
    assert all(one.applies == M.LANGUAGE_MODEL for one in M.measured_in(M.LANGUAGE_MODEL))
    assert [one.applies for one in M.measured_in("post-norm decoder")] == [M.SYNTHETIC]


def test_times_are_those_of_the_benchmark():
    large, small = speeds("training-4-heads.json"), speeds("training-32-heads.json")
    found = {M.SCORES: small["score-mixing"], M.MIXHEAD: small["mixhead-a"], M.FEWER: large["mha"]}
    assert {change: round(small["mha"] / speed, 1) for change, speed in found.items()} == TIMES


def test_smaller_start_fails_at_the_higher_rate_as_said():
    rows = [TRAININGS["fast-start", f"h4-{name}-4e-3"] for name in ("small-start", "mha")]
    behind = [rows[0][seed]["losses"]["fit"]["bits"] - rows[1][seed]["losses"]["fit"]["bits"] for seed in SEEDS]
    assert [value > 0.5 for value in behind] == [False, True, True]


def test_head_embeddings_end_behind_as_recorded():
    mhe = fit("h4-mhe-mul", "above-head-size")
    behind = {"behind_mha": mhe - fit("h4-mha-narrow", "above-head-size")}
    behind["ahead_of_sha"] = fit("h4-sha", "above-head-size") - mhe
    assert pytest.approx(behind, abs=0.0006) == HEAD_EMBEDDINGS


def test_needs_of_published_models_are_those_of_the_records():
    lines = published_models.longest(read(RESULTS / "evidence-published-models.jsonl"))
    for model in published_models.MODELS:
        rows = published_models.of(lines, model)
        assert {(line["text"], line["tolerance"]) for line in rows} == {
            (text, TOLERANCE) for text in ("wikitext-2", "film-reviews")
        }
        low, high = min(line["own"] for line in rows), max(line["need"] for line in rows)
        assert re.search(rf"{model} (uses )?between {low} and {high} of", M.PUBLISHED)
