"""The outcomes of the measurement follow from its results, and the models of known answer are built as said."""

from pathlib import Path

import pytest

from experiments.evidence import measure
from fairseq_lowrank.tools.measuring.measurement import least_rank

ROOT = Path(__file__).resolve().parents[2]
LINES = measure.read(ROOT / "results" / "evidence-measure.jsonl")


def line(model, **numbers):
    return {"model": model, "seed": 1, **numbers}


@pytest.mark.parametrize(
    "needs, outcome",
    [([4, 4], "held"), ([4, 3], "contradicted"), ([], "not run"), ([4], "as predicted under one seed")],
)
def test_outcome_asks_every_seed(needs, outcome):
    lines = [line("point-8x4", need=need) for need in needs]
    assert measure.outcome(measure.PREDICTIONS["E1"], lines) == outcome


def test_last_quarter_separates_only_if_the_shares_do():
    bound, free = line("point-8x4", last_quarter=0.2), line("recall-1x64", last_quarter=0.001)
    assert measure.separates([bound, free]) == "held"
    assert measure.separates([bound | {"last_quarter": 0.02}, free]) == "unclear"
    assert measure.separates([bound, free | {"last_quarter": 0.3}]) == "contradicted"
    assert measure.separates([bound]) == "not run"


def test_models_of_known_answer_are_measured(monkeypatch):
    monkeypatch.setattr(measure, "POINT_STEPS", 1)
    monkeypatch.setattr(measure, "RECALL_STEPS", 1)
    monkeypatch.setattr(measure.matrices, "STEPS", 1)
    sizes = {"point-8x4-score-mixing": 32, "patterns-4x16": 16, "recall-8x8": 8}
    for name, size in sizes.items():
        subject = measure.MODELS[name](1)
        assert {layer.limit for layer in subject.layers} == {size}
        assert subject.evaluate(0) == subject.evaluate(0)


def test_the_tolerance_gives_the_need_where_the_answer_is_known():
    lines = measure.read(ROOT / "results" / "evidence-measure-tolerance.jsonl")
    known = [line for line in lines if line["answer"] is not None]
    assert known
    for line in known:
        costs = dict(line["ranks"])
        assert abs(least_rank(costs.get, costs, 0.01) - line["answer"]) <= 1
