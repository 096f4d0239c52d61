"""Associative recall: what a sequence asks, and that a model learns it."""

import pytest
import torch

from experiments import __main__ as experiments
from experiments.controlled import recall
from experiments.controlled.runs import Journal, Method
from fairseq_lowrank.records.results import read_results

MHA = Method("mha", "mha")


def test_each_key_is_asked_once_and_its_answer_is_the_value_behind_it():
    tokens, answers = recall.sequences(200, torch.Generator().manual_seed(1))
    assert tokens.shape == answers.shape == (200, recall.LENGTH)
    for sequence, asked in zip(tokens.tolist(), answers.tolist(), strict=True):
        pairs = dict(zip(sequence[:8:2], sequence[1:8:2], strict=True))
        assert len(pairs) == len(set(pairs.values())) == recall.PAIRS
        assert all(0 < key < 128 <= value < 256 for key, value in pairs.items())
        queries = {sequence[place]: answer for place, answer in enumerate(asked) if answer != recall.IGNORED}
        assert queries == pairs
        assert all(answer == recall.IGNORED for answer in asked[:8])


def test_near_repeats_are_the_likelier():
    _, answers = recall.sequences(2000, torch.Generator().manual_seed(1))
    counts = (answers != recall.IGNORED).sum(0)
    assert counts[8] > counts[20] > counts[62] > 0
    assert counts[9::2].sum() == 0


def test_a_model_sees_no_later_token():
    torch.manual_seed(1)
    model = recall.Model(MHA, 4).eval()
    tokens, _ = recall.sequences(2, torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 40:] = 5
    torch.testing.assert_close(model(tokens)[:, :40], model(changed)[:, :40])
    assert not torch.allclose(model(tokens)[:, 45], model(changed)[:, 45])


@pytest.fixture
def easy(monkeypatch):
    for name, value in {"PAIRS": 1, "LENGTH": 8, "VOCABULARY": 8, "TEST": 100, "TEST_INTERVAL": 20}.items():
        monkeypatch.setattr(recall, name, value)


def test_an_easy_recall_is_learned_and_training_ends_there(easy):
    journal = Journal("run")
    result = recall.train(MHA, 4, 1, 100 * 20, journal)
    assert result["value"] <= recall.TARGET_ERROR
    assert result["updates"] < 2000
    assert len(journal.lines) == 1 + result["updates"] / 20


def test_the_command_runs_a_trial(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recall, "TEST", 8)
    path = tmp_path / "lines.jsonl"
    flags = ["--quick", "--steps", "1", "--results", str(path)]
    assert experiments.main(["controlled", "recall", *flags]) == 0
    assert "8 × 8" in capsys.readouterr().out
    assert [line["row"] for line in read_results(path, measurements=True)] == ["h1-mha-1-updates", "h8-mha-1-updates"]


def test_a_line_names_the_size_that_heads_have():
    sizes = {run.row: run.setting["head_dim"] for run in recall.runs()}
    assert (sizes["h8-mha"], sizes["h8-fixedhead"], sizes["h1-mha"]) == (8, 64, 64)


def test_rows_at_other_rates_train_at_them(easy):
    runs = {run.row: run for run in recall.runs()}
    rates = {"h1-mha": 2e-3, "h8-mha": 2e-3, "h8-mha-5e-4": 5e-4}
    logs = []
    for row, rate in rates.items():
        assert runs[row].setting["learning_rate"] == rate
        trained, expected = Journal("run"), Journal("run")
        runs[row].train(1, 20, trained)
        recall.train(MHA, runs[row].setting["heads"], 1, 20, expected, rate)
        assert trained.lines == expected.lines
        logs.append(trained.lines)
    assert logs[1] != logs[2]
