"""Contrasts that were predicted before the runs, and their outcomes."""

import json

import pytest

from experiments.__main__ import main
from experiments.papers import planned
from fairseq_lowrank import cli

SCORES = {"mha": {1: 10.0, 2: 11.0, 3: 12.0}, "mixhead-a": {1: 11.0, 2: 13.0, 3: 15.0}, "gain": {2: 11.0, 4: 9.0}}
VALUES = {"zero": [0.0, 0.0, 0.0], "one": [1.0, 1.1, 0.9], "near": [0.001, -0.001, 0.0], "wide": [3.0, -3.0, 1.0]}


@pytest.fixture
def write(tmp_path):
    """``write(scores, metric)``: append lines to a file of results, and return its path."""

    def append(scores=SCORES, metric="loss"):
        with open(tmp_path / "a.jsonl", "a") as file:
            for row, by_seed in scores.items():
                for seed, value in by_seed.items():
                    line = {"table": "t", "row": row, "seed": seed, "metric": metric, "value": value, "split": "test"}
                    file.write(json.dumps(line) + "\n")
        return str(tmp_path / "a.jsonl")

    return append


@pytest.fixture
def named(tmp_path):
    """``named(*contrasts)``: write a file of contrasts, and return its path."""

    def file(*contrasts):
        entries = [{"metric": "loss", "split": "test", "prediction": "> 0"} | entry for entry in contrasts]
        (tmp_path / "named.json").write_text(json.dumps({"t": entries}))
        return str(tmp_path / "named.json")

    return file


@pytest.fixture
def outcomes(capsys):
    """``outcomes(file, lines)``: the rows that the command prints as JSON."""

    def run(*words):
        assert main(["contrasts", *words, "--table", "t", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_planned_contrasts_are_those_of_pairs_and_interactions(write, named, outcomes, capsys):
    lines = write(SCORES | {"sha": {1: 1.0, 2: 0.0, 3: 3.0}})
    write({"mha": {1: 99.0}}, metric="bleu")
    pair, interaction = ["mixhead-a", "mha"], ["mixhead-a", "mha", "sha", "mha"]
    file = named(
        {"name": "mixing helps", "rows": pair},
        {"name": "not run", "rows": ["mha", "mhe-mul"]},
        {"name": "more than sha", "rows": interaction},
    )
    first, absent, last = outcomes(file, lines)
    asked = ["--metric", "loss", "--pair", *pair, "--interaction", *interaction, "--json"]
    assert cli.main(["compare", lines, *asked]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert (first["contrast"], last["contrast"]) == ("mixing helps, test", "more than sha, test")
    assert (first["prediction"], first["outcome"]) == ("> 0", "unclear")
    for ours, theirs in zip((first, last), expected, strict=True):
        assert {key: ours[key] for key in theirs if key not in ("contrast", "t_holm")} == {
            key: theirs[key] for key in theirs if key not in ("contrast", "t_holm")
        }
        # corrected for the one that was not run too
        assert ours["t_holm"] >= theirs["t_holm"]
    assert (expected[0]["t_holm"], first["t_holm"]) == (first["t_p"], 2 * first["t_p"])
    assert (absent["mean"], absent["t_holm"], absent["notes"]) == (None, None, ["not run yet: mhe-mul"])
    assert main(["contrasts", file, lines, "--table", "t"]) == 0
    printed = capsys.readouterr().out
    assert "not run, test: not run yet: mhe-mul" in printed and "p (within margin)" in printed


def test_a_contrast_without_runs_says_why(write, named, outcomes):
    lines = write({"a": {1: 1.0}, "b": {2: 1.0}, "c": {1: 0.5}})
    other_metric = {"name": "other metric", "rows": ["a", "c"], "metric": "bits"}
    pairs = [{"name": "apart", "rows": ["a", "b"]}, other_metric, {"name": "complete", "rows": ["a", "c"]}]
    apart, other, complete = outcomes(named(*pairs), lines)
    assert (apart["mean"], apart["notes"]) == (None, ["no common seed (a: 1; b: 2)"])
    assert (other["mean"], other["notes"]) == (None, ["run, without bits of test: a, c"])
    assert complete["mean"] == 0.5


def test_the_picture_has_all_contrasts_and_margins(write, named, outcomes):
    lines = write({name: dict(enumerate(values)) for name, values in VALUES.items()})
    equal = {"name": "equal", "rows": ["near", "zero"], "prediction": "= 0", "margin": 0.01}
    rows = outcomes(named({"name": "not run", "rows": ["mha", "mhe-mul"]}, equal), lines)
    [axes] = planned.plot_planned(rows).axes
    first, second = [label.get_text() for label in axes.get_yticklabels()]
    assert first == "not run, test\nA=mha, B=mhe-mul\nno result yet"
    assert second == "equal, test\nA=near, B=zero\nheld; neither side clearly better; 3 seeds"
    [band] = axes.collections
    assert band.get_paths()[0].get_extents().extents == pytest.approx([-0.01, 0.65, 0.01, 1.35])
    assert {line.get_color() for line in axes.lines[:-1]} == {planned.OUTCOME_COLOURS["held"]}


def test_equal_differences_hold_no_prediction_and_a_note_says_why(write, named, outcomes):
    lines = write({"a": {1: 12.34, 2: 15.67, 3: 11.03}, "b": {1: 12.31, 2: 15.64, 3: 11.0}})
    (found,) = outcomes(named({"name": "x", "rows": ["a", "b"]}), lines)
    assert found["outcome"] == "unclear" and found["t_p"] == pytest.approx(0.0955, abs=1e-3)
    [note] = found["notes"]
    assert "equal after rounding" in note and "set to 0.01," in note


@pytest.mark.parametrize(
    ("row", "prediction", "outcome"),
    [
        ("one", {"prediction": "> 0"}, "held"),
        ("one", {"prediction": "< 0"}, "contradicted"),
        ("wide", {"prediction": "> 0"}, "unclear"),
        ("one", {"prediction": "at least 0.5"}, "held"),
        ("one", {"prediction": "at most 0.5"}, "contradicted"),
        ("one", {"prediction": "at most 1"}, "unclear"),
        ("near", {"prediction": "= 0", "margin": 0.01}, "held"),
        ("one", {"prediction": "= 0", "margin": 0.01}, "contradicted"),
        ("wide", {"prediction": "= 0", "margin": 0.01}, "unclear"),
        ("near", {"prediction": "= 0"}, "unclear"),
        ("one", {"prediction": "= 1", "margin": 0.5}, "held"),
    ],
)
def test_a_planned_contrast_carries_its_outcome(write, named, outcomes, row, prediction, outcome):
    lines = write({name: dict(enumerate(values)) for name, values in VALUES.items()})
    (found,) = outcomes(named({"name": "x", "rows": [row, "zero"]} | prediction), lines)
    assert (found["outcome"], found["prediction"]) == (outcome, prediction["prediction"])
    assert (found["equivalence_p"] is None) == ("margin" not in prediction)
    assert any("no margin" in note for note in found["notes"]) == (prediction == {"prediction": "= 0"})


@pytest.mark.parametrize(
    "entry",
    [{"prediction": "maybe"}, {"prediction": "> 0", "margin": 0.1}, {"prediction": "= 0", "margin": -1}],
)
def test_a_prediction_that_cannot_be_tested_is_refused(write, named, capsys, entry):
    file = named({"name": "x", "rows": ["mha", "gain"]} | entry)
    assert main(["contrasts", file, write(), "--table", "t"]) == 2
    assert "is not a contrast" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "table", "message"),
    [
        ('{"t": []}', "other", "no contrasts for table 'other'. Choose from t"),
        ('{"t": [{"name": "x"}]}', "t", '{"name": "x"} is not a contrast'),
        ('{"t": [', "t", "Give a JSON file"),
    ],
)
def test_a_file_without_contrasts_is_refused_in_one_line(write, tmp_path, capsys, content, table, message):
    (tmp_path / "named.json").write_text(content)
    assert main(["contrasts", str(tmp_path / "named.json"), write(), "--table", table]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
