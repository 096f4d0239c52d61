"""The nearest point on the sphere: the answers, the layer that has them, and what training sees."""

import pytest
import torch

from experiments.controlled import nearest_point
from experiments.controlled.runs import Method, learning_rate

MHA = Method("mha", "mha")


def test_answers_are_the_points_of_least_inner_product():
    x = nearest_point.points(3, torch.Generator().manual_seed(1))
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(nearest_point.POINTS, 3))
    y = nearest_point.answers(x)
    for sentence in range(3):
        for i in range(nearest_point.POINTS):
            products = [float(x[i, sentence] @ x[j, sentence]) for j in range(nearest_point.POINTS)]
            assert torch.equal(y[i, sentence], x[products.index(min(products)), sentence])


def test_one_full_rank_head_has_the_answer():
    """W_Q W_Kᵀ = −β I, values of the points themselves, written over them: the construction of the paper."""
    layer = nearest_point.Layer(MHA, heads=1)
    identity = torch.eye(nearest_point.EMBED_DIM)
    with torch.no_grad():
        for parameter in layer.attention.parameters():
            parameter.zero_()
        layer.attention.q_proj.weight.copy_(-1e5 * identity)
        layer.attention.k_proj.weight.copy_(identity)
        layer.attention.v_proj.weight.copy_(identity)
        layer.attention.out_proj.weight.copy_(1e4 * identity)
        layer.fc2.weight.zero_()
        layer.fc2.bias.zero_()
        x = nearest_point.points(16, torch.Generator().manual_seed(2))
        assert nearest_point.squared_error(layer, x) < 0.01
        layer.attention.q_proj.weight.zero_()
        assert nearest_point.squared_error(layer, x) > 0.5


def test_the_rate_warms_up_and_ends_at_zero():
    rates = [learning_rate(step, 1000) for step in range(1001)]
    assert (rates[0], rates[25], rates[50], rates[1000]) == (0, 0.5, 1, pytest.approx(0, abs=1e-12))
    assert rates.index(max(rates)) == 50


def test_training_lowers_the_error_and_is_the_same_each_time(monkeypatch):
    monkeypatch.setattr(nearest_point, "BATCH", 16)
    monkeypatch.setattr(nearest_point, "TEST_BATCHES", 2)
    log = []
    first, second = (nearest_point.train(MHA, 1, 1, 60, log.append) for _ in range(2))
    assert first == second
    assert first["value"] < float(log[0].split()[1]) / 1.5


def test_rows_that_need_axes_which_are_not_there_are_left_out(monkeypatch):
    names = {method.name for method, _ in nearest_point.rows() if method.exists()}
    assert {"mha", "mixhead-a", "fixedhead-32", "gain", "sigsoftmax"} <= names
    assert not Method("later", "mha", {"no_such_axis": 1}).exists()
    assert not Method("later", "no-such-preset").exists()
    rows = [(run.row, run.seed) for run in nearest_point.runs()]
    assert len(rows) == len(set(rows))
    assert {row for row, _ in ((run.row, run.seed) for run in nearest_point.runs(quick=True))} == {
        "h8-mha",
        "h1-mha",
        "h8-mixhead-a",
    }


def test_every_method_has_its_own_line_in_the_picture():
    def line(name, heads):
        return {"method": name, "heads": heads, "seed": 1, "value": heads / 20, "flags": "--attention mha"}

    names = ["mha", "mixhead-a", "score-mixing", *(f"method-{number}" for number in range(10))]
    lines = [*(line(name, 8) for name in names), line("mha", 1), line("mha", 2)]
    left, right = nearest_point.plot(lines).axes
    assert [bars.get_label() for bars in left.containers] == ["mha"]
    assert {label.get_text() for label in right.get_yticklabels()} == set(names)
    assert len({bars.lines[0].get_ydata()[0] for bars in right.containers}) == len(names)
    assert nearest_point.kind_of("mixhead-a") == "OV" and nearest_point.kind_of("score-mixing") == "QK"
