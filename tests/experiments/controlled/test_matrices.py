"""Known attention matrices: the closed form against the layer's own outputs, and what the task asks."""

import pytest
import torch
from needed_axes import needed_axes

from experiments.controlled import matrices
from experiments.controlled.runs import Method
from fairseq_lowrank.attention import PRESETS

LENGTH = 6

# keys and values of the first three are one input; outputs of the next three are not linear in the content; the last read distances
OTHERS = ("el", "skv", "mla", "mhe-add", "tpa", "xsa", "alibi", "t5-bias")
METHODS = [
    *(Method(preset, preset, needed_axes(preset)) for preset in PRESETS if preset not in OTHERS),
    Method("sigsoftmax", "mixhead-b", {"activation": "sigsoftmax"}),
    Method("mfa-wide", "mfa", {"head_dim": 64}),
]


def perturbed(method):
    """A layer whose mixing and head embeddings are away from their starts."""
    layer = matrices.build_layer(method, 8, seed=3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, dtype=parameter.dtype)
    return layer


@pytest.mark.parametrize("target", matrices.SLICES)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_closed_form_is_the_error_over_every_unit_content(method, target):
    """For entries of mean 0 and variance 1 the expectation is the sum over the n·d unit contents, each a batch entry."""
    positions, wanted = matrices.problem(LENGTH, LENGTH, target, seed=7)
    layer = perturbed(method)
    contents = torch.eye(LENGTH * 64, dtype=torch.float64).view(-1, LENGTH, 64).transpose(0, 1)
    query = positions.unsqueeze(1).expand(-1, contents.size(1), -1)
    with torch.no_grad():
        outputs, _ = layer(query, query, contents, need_weights=False)
        error = matrices.relative_error(*matrices.layer_map(layer, positions), wanted)
    slices = contents.unflatten(-1, (wanted.size(0), -1))
    answers = torch.einsum("snm,mbsc->nbsc", wanted, slices).flatten(2)
    torch.testing.assert_close(error, (outputs - answers).square().sum() / answers.square().sum())


def test_a_layer_that_has_the_answer_has_no_error_and_one_that_says_nothing_has_error_one():
    _, wanted = matrices.problem(LENGTH, LENGTH, "own", seed=1)
    # eight heads, one for each slice of eight columns
    values = torch.eye(64, dtype=torch.float64).view(64, 8, 8).transpose(0, 1)
    assert matrices.relative_error(wanted, values, values.mT, wanted).abs() < 1e-12
    assert matrices.relative_error(wanted, values, 0 * values.mT, wanted) == 1


def test_positions_have_the_rank_asked_for_and_matrices_are_row_stochastic():
    for rank in (3, LENGTH):
        positions, wanted = matrices.problem(LENGTH, rank, "own", seed=2)
        assert torch.linalg.matrix_rank(positions) == rank
        assert wanted.shape == (8, LENGTH, LENGTH)
        assert (wanted > 0).all()
        torch.testing.assert_close(wanted.sum(-1), torch.ones(8, LENGTH, dtype=torch.float64))
    with pytest.raises(ValueError, match="rank 7: expected 1 to 6"):
        matrices.problem(LENGTH, 7, "own", seed=2)


def test_a_seed_draws_one_problem_for_every_method(monkeypatch):
    drawn, draw = [], matrices.problem
    monkeypatch.setattr(matrices, "problem", lambda *asked, **more: drawn.append(draw(*asked, **more)) or drawn[-1])
    for name in ("mha", "mixhead-a"):
        matrices.train(Method(name, name), 8, LENGTH, LENGTH, "own", 4, 1, [].append)
    monkeypatch.undo()
    assert len(drawn) == 2 and all(torch.equal(*pair) for pair in zip(*drawn, strict=True))
    first, second = (matrices.problem(LENGTH, LENGTH, "own", seed=4) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert not torch.equal(first[1], matrices.problem(LENGTH, LENGTH, "own", seed=5)[1])


def test_the_control_of_fixedhead_has_as_many_parameters_and_small_heads():
    for heads, length in ((8, 16), (32, 16), (4, 32)):
        built = {
            method.name: matrices.build_layer(method, count, 1)
            for method, count in matrices.methods(heads, length)
            if method.exists()
        }
        wide, many = built[matrices.FIXEDHEAD], built[matrices.MORE_HEADS]
        assert sum(p.numel() for p in wide.parameters()) == sum(p.numel() for p in many.parameters())
        assert (wide.head_dim, many.head_dim) == (length, 64 // heads)


def test_training_follows_the_gradient_and_is_the_same_each_time():
    method = Method("mixhead-a", "mixhead-a")
    log = []
    first, second = (matrices.train(method, 8, LENGTH, LENGTH, "shared", 1, 30, log.append) for _ in range(2))
    assert first == second
    assert first["value"] < float(log[0].split()[1]) / 4
    assert first["parameters"] == 4 * 64 * 64 + 64


@pytest.mark.parametrize("preset", ["mhe-add", "tpa"])
def test_a_method_whose_output_is_no_linear_map_of_the_content_is_refused(preset):
    with pytest.raises(ValueError, match=f"{preset}: .* not a linear map of the content"):
        matrices.build_layer(Method(preset, preset), 8, seed=1)


def test_the_grid_names_each_run_once_and_leaves_out_methods_that_are_not_there(monkeypatch):
    rows = [(run.row, run.seed) for run in matrices.runs()]
    assert len(rows) == len(set(rows))
    quick = {(run.row, run.seed) for run in matrices.runs(quick=True)}
    assert quick < set(rows)
    monkeypatch.setattr(matrices, "PRESET_METHODS", ("mha", "no-such-method"))
    assert not [run for run in matrices.runs() if "no-such" in run.row]


def test_the_legend_covers_no_plot():
    fixed = {"length": 16, "rank": 16, "target": "shared", "seed": 1}
    lines = [
        fixed | {"method": name, "flags": f"--attention {name}", "small_head_dim": size, "value": 0.1}
        for name in (*matrices.PRESET_METHODS, *(later.name for later in matrices.LATER_METHODS))
        for size in (2, 4)
    ]
    figure = matrices.plot(lines)
    figure.draw_without_rendering()
    [legend] = figure.legends
    assert not any(legend.get_window_extent().overlaps(axes.get_window_extent()) for axes in figure.axes)
