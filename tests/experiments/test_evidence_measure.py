"""The outcomes of the measurement follow from its results, and the models of known answer are built as said."""

import os
from pathlib import Path

import pytest

from experiments.evidence import measure
from fairseq_lowrank.records.locks import locked

ROOT = Path(__file__).resolve().parents[2]
LINES = measure.read(ROOT / "results" / "evidence-measure.jsonl")


def line(model, **numbers):
    return {"model": model, "seed": 1, **numbers}


@pytest.mark.parametrize(
    "needs, outcome",
    [([4, 4], "held"), ([4, 3], "contradicted"), ([], "not run"), ([4], "as predicted under one seed")],
)
def test_outcome_asks_every_seed(needs, outcome):
    lines = [line("point-8x4", needs=[[measure.PREDICTED, need]]) for need in needs]
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


def test_a_tolerance_stands_if_every_need_is_right():
    def lines(*needs):
        shares = (0.002, 0.01, 0.05)
        return [
            line(
                model,
                worth_share=0.5,
                needs=[[share, need or least] for share, need in zip(shares, needs, strict=True)],
            )
            for model, (least, _) in measure.ANSWERS.items()
        ]

    assert measure.stands(lines(None, None, 1)) == "held"
    assert measure.stands(lines(None, 1, 1)) == "contradicted"
    assert measure.stands(lines(1, 1, 1)) == "unclear"
    assert measure.stands(lines(None, None, None)[1:]) == "not run"
    assert measure.right_needs([*lines(None, None, 1), line("another", needs=[[0.01, 4]])])[0.01] == 9


def test_outcomes_are_those_of_the_tolerance_of_the_predictions():
    """Another tolerance of the verdict must not change what came of a prediction."""
    found = measure.outcomes(LINES)
    for place in (0, 1, 2):
        moved = [one | {"tolerance": one["needs"][place][0], "need": one["needs"][place][1]} for one in LINES]
        assert measure.outcomes(moved) == found
    assert found["E16"] == found["E20"] == "contradicted"


def test_a_line_replaces_that_of_another_tolerance(tmp_path):
    path = tmp_path / "lines.jsonl"
    for found in (line("one", tolerance=0.01), line("two", tolerance=0.01), line("one", tolerance=0.002)):
        measure.replace(path, found)
    assert [(one["model"], one["tolerance"]) for one in measure.read(path)] == [("two", 0.01), ("one", 0.002)]
    measure.replace(path, line("two", tolerance=0.002) | {"seed": 2})
    assert len(measure.read(path)) == 3


def test_a_half_written_line_is_named_and_ended(tmp_path, capsys):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"model": "a"}\n{"mod')
    measure.append(path, {"model": "b"})
    assert [line["model"] for line in measure.read(path)] == ["a", "b"]
    assert "lines.jsonl, line 2: not JSON" in capsys.readouterr().err


def test_a_line_that_another_process_appends_meanwhile_is_not_lost(tmp_path, monkeypatch):
    free = []

    def read(path):
        with locked(path.parent, os.O_RDONLY, wait=False) as handle:
            free.append(handle is not None)
        return []

    monkeypatch.setattr(measure, "read", read)
    measure.replace(tmp_path / "lines.jsonl", line("one"))
    assert free == [False]


def test_the_page_has_the_number_of_right_needs():
    counts = measure.right_needs(LINES)
    known = sum(line["model"] in measure.ANSWERS for line in LINES)
    text = (ROOT / "docs" / "evidence" / "measure.md").read_text(encoding="utf-8")
    sentence = f"Of {known} needs {counts[0.01]} are right at 1 %, {counts[0.002]} at 0.2 %, and {counts[0.05]} at 5 %."
    assert sentence in text


def test_lines_say_where_they_come_from():
    for found in LINES:
        assert found["date"] and found["machine"]["cpu"], found["model"]
        assert len(found["commit"]) == 40 and len(found["code"]) == 64, found["model"]


def test_added_loss_is_in_the_unit_of_the_metric():
    found = line("any", value=2.0, ranks=[[4, 0.25]], worth_share=0.5)
    assert measure.loss_at(found, 4) == pytest.approx(0.25)
