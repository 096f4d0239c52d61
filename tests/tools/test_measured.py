"""The measurements that `advise` cites, computed again from the records of this repository."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import pytest

from fairseq_lowrank.tools.advice.measured import HEAD_EMBEDDINGS, MEASURED

RESULTS = Path(__file__).resolve().parents[2] / "results"
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


COMPUTED = {
    "mixing of scores": lambda: {
        "mixed": error("h8-score-mixing"),
        "plain": error("h8-mha"),
        "after": error("h8-mixhead-a"),
    },
    "fewer, larger heads": lambda: {
        "lead": lead("h4-mha-2e-3", "h32-mha-2e-3"),
        "small_start": lead("h4-small-start-2e-3", "h32-small-start-2e-3"),
    },
    "larger heads": lambda: {
        "behind": fit("h32-fixedhead", "above-head-size") - fit("h32-mha-wide", "above-head-size")
    },
    "a half-scale start": lambda: {
        "large": lead("h4-small-start-2e-3", "h4-mha-2e-3"),
        "small": lead("h32-small-start-2e-3", "h32-mha-2e-3"),
    },
    "pre-norm": lambda: {"lead": lead("h4-mha-pre-norm-2e-3", "h4-mha-2e-3")},
    "a gain": lambda: {
        "plain": lead("h4-gain-2e-3", "h4-mha-2e-3"),
        "fast": lead("h4-gain-4e-3", "h4-mha-4e-3"),
    },
    "mixing after": lambda: {
        "large": lead("h4-mixhead-a-2e-3", "h4-mha-2e-3"),
        "small": lead("h32-mixhead-a-2e-3", "h32-mha-2e-3"),
        "fast": lead("h4-mixhead-a-4e-3", "h4-mha-4e-3"),
    },
}


@pytest.mark.parametrize("measurement", MEASURED, ids=lambda one: one.change[:24])
def test_measurement_has_the_numbers_of_the_records(measurement):
    (computed,) = [numbers for start, numbers in COMPUTED.items() if measurement.change.startswith(start)]
    assert measurement.numbers == pytest.approx(computed(), abs=0.0006)
    assert all(str(number) in json.dumps(measurement.as_dict()) for number in measurement.numbers.values())


def test_smaller_start_fails_at_the_higher_rate_as_said():
    rows = [TRAININGS["fast-start", f"h4-{name}-4e-3"] for name in ("small-start", "mha")]
    behind = [rows[0][seed]["losses"]["fit"]["bits"] - rows[1][seed]["losses"]["fit"]["bits"] for seed in SEEDS]
    assert [value > 0.5 for value in behind] == [False, True, True]


def test_head_embeddings_end_behind_as_recorded():
    mhe = fit("h4-mhe-mul", "above-head-size")
    behind = {"behind_mha": mhe - fit("h4-mha-narrow", "above-head-size")}
    behind["ahead_of_sha"] = fit("h4-sha", "above-head-size") - mhe
    assert pytest.approx(behind, abs=0.0006) == HEAD_EMBEDDINGS
