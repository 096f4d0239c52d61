"""In-context regression: its answers, the error of linear attention, and what training sees."""

import pytest
import torch

from experiments.controlled import regression
from experiments.controlled.runs import Method

MHA = Method("mha", "mha", {"head_dim": 2})


def test_answers_are_linear_in_the_inputs_of_a_prompt():
    x, y = regression.prompts(3, torch.Generator().manual_seed(1))
    assert (x.shape, y.shape) == ((64, 3, 16), (64, 3, 1))
    weights = torch.linalg.lstsq(x.transpose(0, 1), y.transpose(0, 1)).solution
    torch.testing.assert_close(torch.einsum("tbi,bij->tbj", x, weights), y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rank", [4, 16])
def test_linear_attention_has_the_error_of_the_closed_form(rank):
    class Linear(torch.nn.Module):
        def forward(self, x, y):
            n, d = regression.PAIRS, regression.INPUTS
            w = (x[:n, :, :rank] * y[:n]).sum(0) / (n + d + 1)
            return (x[n:, :, :rank] * w).sum(-1, keepdim=True)

    error = regression.squared_error(Linear(), *regression.prompts(4000, torch.Generator().manual_seed(2)))
    assert float(error) == pytest.approx(regression.linear_error(rank), abs=0.01)


def test_a_model_does_not_read_the_answers_that_it_predicts():
    torch.manual_seed(1)
    model = regression.Model(MHA, 4)
    x, y = regression.prompts(2, torch.Generator().manual_seed(1))
    changed = y.clone()
    changed[regression.PAIRS :] += 1
    torch.testing.assert_close(model(x, changed), model(x, y))


def test_the_rank_of_a_row_is_that_of_all_its_heads():
    ranks = {run.row: regression.rank({"method": run.method.name, **run.setting}) for run in regression.runs()}
    assert ranks == {
        "h4-mha": 8,
        "h4-queries-32": 16,
        "h4-structured": 16,
        "h4-score-mixing": 8,
        "h4-mixhead-a": 8,
        "h4-gain": 8,
        "h8-mha": 16,
        "h16-mha": 16,
        "h2-mha-16": 16,
        "h1-mha-32": 16,
    }
    for method, heads in regression.rows():
        layer = regression.Model(method, heads).attention
        mixed = layer.score_mixing is not None
        at_once = layer.projection.score_rank(mixed=mixed) * (1 if mixed else heads)
        assert min(16, at_once) == ranks[f"h{heads}-{method.name}"]


def test_training_lowers_the_error_and_is_the_same_each_time(monkeypatch):
    monkeypatch.setattr(regression, "BATCH", 16)
    monkeypatch.setattr(regression, "TEST_BATCHES", 2)
    log = []
    first, second = (regression.train(MHA, 16, 1, 150, log.append) for _ in range(2))
    assert first == second
    assert first["value"] < 0.9
