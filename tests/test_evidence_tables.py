"""The predictions of the evidence, and the tables that `python -m experiments tables` prints."""

import csv
import io
import re

import pytest

pytest.importorskip("scipy")

from experiments import __main__ as experiments
from experiments.evidence import measure, predictions, published_models, tables
from experiments.evidence.lines import RESULTS

PREDICTIONS = {(group["experiment"], one["id"]): one for group in predictions.groups() for one in group["predictions"]}
OUTCOMES = ("held", "contradicted", "unclear", "not run", "as predicted under one seed", "against the prediction under")
COMPUTED = {
    **{key: predictions.outcome(one["compute"])[0] for key, one in PREDICTIONS.items() if "compute" in one},
    **{
        ("measure", name): found
        for name, found in measure.outcomes(measure.read(RESULTS / "evidence-measure.jsonl")).items()
    },
    **{
        ("published-models", name): found
        for name, found in published_models.outcomes(measure.read(RESULTS / "evidence-published-models.jsonl")).items()
    },
}


def test_each_prediction_has_a_rule_a_commit_and_an_outcome():
    assert len(PREDICTIONS) == sum(len(group["predictions"]) for group in predictions.groups())
    for key, one in PREDICTIONS.items():
        assert one["text"] and one["rule"], key
        assert re.fullmatch(r"[0-9a-f]{40}", one["commit"]), key
        assert one["outcome"].startswith(OUTCOMES), key


def test_outcomes_follow_from_the_lines():
    assert len(COMPUTED) > 95
    differ = {key: found for key, found in COMPUTED.items() if not PREDICTIONS[key]["outcome"].startswith(found)}
    assert not differ


@pytest.mark.parametrize(
    ("held", "allowed", "word"),
    [
        ([0.1, 0.2], [0.0, 0.3], "held"),
        ([0.2, None], [0.1, None], "unclear"),
        ([0.3, None], [0.2, None], "contradicted"),
        ([None, 0.05], [None, 0.1], "contradicted"),
    ],
)
def test_an_outcome_follows_from_the_mean_and_two_ranges(held, allowed, word):
    of = {"table": "language-model", "rows": ["h32-mha", "h4-mha"], "split": "test"}  # 0.155
    assert predictions.computed(**of, held=held, allowed=allowed)[0] == word


def test_a_prediction_with_parts_holds_if_each_part_does():
    part = {"table": "language-model", "rows": ["h32-mha", "h4-mha"], "split": "test"}  # 0.155
    held, contradicted = part | {"held": [0, 1], "allowed": [0, 1]}, part | {"held": [1, 2], "allowed": [1, 2]}
    assert predictions.outcome([held, held])[0] == "held"
    assert predictions.outcome([held, contradicted])[0] == "contradicted"
    assert predictions.outcome([held])[1] == "0.155 (0.082 … 0.228)"


def test_an_interval_around_zero_decides_no_sign():
    of = {"table": "above-head-size", "rows": ["h4-mhe-mul", "h4-mha-narrow"], "split": "fit"}
    decided, undecided = (predictions.computed(**of, held=[0, 1], allowed=[0, None], sign=sign)[0] for sign in (0, 1))
    assert (decided, undecided) == ("held", "unclear")


@pytest.mark.parametrize("name", tables.SECTIONS)
def test_tables_are_printed_and_their_csv_has_every_row(name, capsys):
    assert experiments.main(["tables", name]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert experiments.main(["tables", name, "--csv"]) == 0
    found = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert len([row for row in found if row]) == len(rows) - sum(line.startswith("| ---") for line in rows)
    widths = {len(row) for row in found if row}
    assert widths <= {line.count("|") - line.count("\\|") - 1 for line in rows}


def test_another_name_is_refused_with_the_names(capsys):
    assert experiments.main(["tables", "fast-starts"]) == 2
    assert f"NAME 'fast-starts': unknown. Use one of {', '.join(tables.SECTIONS)}." in capsys.readouterr().err
    assert experiments.main(["tables"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(tables.SECTIONS)
