import csv
import json

import pytest
import torch

from experiments import __main__ as experiments
from experiments import representation


def problem(n, embed_dim, count=3, seed=5):
    generator = torch.Generator().manual_seed(seed)
    x = representation.random_inputs(n, embed_dim, generator=generator)
    return x, representation.random_row_stochastic(count, n, generator=generator)


def test_targets_are_positive_with_rows_that_sum_to_one():
    _, target = problem(9, 9)
    assert (target > 0).all()
    torch.testing.assert_close(target.sum(-1), torch.ones(3, 9, dtype=torch.float64))


@pytest.mark.parametrize("embed_dim", [12, 20])
@pytest.mark.parametrize("head_dim", [11, 12, 15])
def test_the_construction_reaches_every_matrix_from_head_size_n_minus_1(embed_dim, head_dim):
    x, target = problem(12, embed_dim)
    w_query, w_key = representation.closed_form(x, target, head_dim)
    assert w_query.shape == w_key.shape == (3, embed_dim, head_dim)
    assert (representation.attention_matrix(x, w_query, w_key) - target).abs().max() < 1e-6


def test_the_construction_misses_matrices_below_head_size_n_minus_1():
    x, target = problem(12, 12)
    fitted = representation.attention_matrix(x, *representation.closed_form(x, target, 10))
    assert representation.relative_error(fitted, target).min() > 1e-3


def test_no_head_of_size_one_can_attend_to_itself_alone_at_length_three():
    # scores q_i·k_j are greatest at the largest or the smallest key, never at the one between
    x, _ = problem(3, 3)
    target = (torch.full((3, 3), 0.01) + 0.97 * torch.eye(3)).double().view(1, 1, 3, 3)
    generator = torch.Generator().manual_seed(0)
    small, enough = (
        representation.relative_error(
            representation.gradient_fit(x, target, head_dim, steps=400, generator=generator), target
        ).item()
        for head_dim in (1, 2)
    )
    assert small > 0.2
    assert enough < small / 4


def test_the_gradient_beats_the_truncated_construction_and_mixing_beats_one_head_on_one_matrix():
    fits = representation.experiment(n=8, heads=4, matrices=2, head_dims=[2], steps=300)
    error = {(fit.method, fit.series): fit.error for fit in fits}
    one_head = error["gradient", representation.ONE_HEAD]
    assert one_head < error["closed form", representation.ONE_HEAD]
    assert error["gradient", representation.ONE_MATRIX] < one_head / 4
    # as many unrelated matrices as heads leave nothing to share
    assert error["gradient", representation.ALL_MATRICES] > one_head / 4


def test_the_same_seed_gives_the_same_errors():
    first, second = (representation.experiment(n=5, heads=2, matrices=1, head_dims=[2], steps=20) for _ in range(2))
    assert first == second


def test_inputs_of_lower_rank_are_refused():
    with pytest.raises(ValueError, match="full row rank"):
        problem(8, 7)
    x, target = problem(4, 4)
    x[3] = x[0]
    with pytest.raises(ValueError, match="full row rank"):
        representation.closed_form(x, target, 4)


def test_inputs_have_the_rank_asked_for():
    generator = torch.Generator().manual_seed(1)
    assert torch.linalg.matrix_rank(representation.random_inputs(8, 12, 3, generator=generator)) == 3
    with pytest.raises(ValueError, match="--input-rank 9: expected 1 to 8"):
        representation.random_inputs(8, 12, 9, generator=generator)


def test_no_head_size_suffices_where_the_inputs_have_a_lower_rank():
    full, low = (
        representation.experiment(n=6, heads=2, matrices=2, head_dims=[6], input_rank=rank, steps=200)
        for rank in (None, 3)
    )
    assert {fit.method for fit in low} == {"gradient"}
    error = {fit.series: fit.error for fit in full if fit.method == "gradient"}
    for fit in low:
        assert fit.error > max(0.1, 5 * error[fit.series])


def test_equal_positions_attend_alike_whatever_is_fitted():
    x, target = problem(4, 4, count=1)
    x[3] = x[0]
    fitted = representation.gradient_fit(
        x, target.view(1, 1, 4, 4), 4, 2, steps=30, generator=torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(fitted[..., 0, :], fitted[..., 3, :])


def test_the_command_writes_a_table_and_files(tmp_path, capsys):
    flags = ["--length", "5", "--heads", "2", "--matrices", "1", "--head-dims", "1", "4", "--steps", "5"]
    assert experiments.main(["representation", *flags, "--output", str(tmp_path)]) == 0
    assert "head size" in capsys.readouterr().out
    with open(tmp_path / "representation.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    data = json.loads((tmp_path / "representation.json").read_text())
    assert data["length"] == 5
    assert next(fit for fit in data["fits"] if fit["head_dim"] == 4 and fit["method"] == "closed form")["error"] < 1e-6


def test_a_length_of_one_is_refused_in_one_line(capsys):
    assert experiments.main(["representation", "--length", "1"]) == 2
    assert capsys.readouterr().err.startswith("python -m experiments representation: error: length 1")
