"""Marsaglia's bound on the rank of mixed heads, compared with exact arithmetic."""

import json

import pytest
import sympy
import torch

from fairseq_lowrank import cli
from fairseq_lowrank.ops import PositionwiseMixing, StaticMixing
from fairseq_lowrank.tools import spectrum


def integers(*shape, seed):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed))


def low_rank(seed, rank, rows=5, columns=6):
    return integers(rows, rank, seed=seed) @ integers(rank, columns, seed=seed + 100)


def shared_dimension(first, second):
    """The dimension of the intersection of two column spaces, from the vectors (x, y) with first·x = second·y."""
    bases = [sympy.Matrix(each.tolist()).columnspace() for each in (first, second)]
    if not all(bases):
        return 0
    together = sympy.Matrix.hstack(*bases[0], *(-column for column in bases[1]))
    return len(together.nullspace())


def exact(own, others):
    ranks = [sympy.Matrix(each.tolist()).rank() for each in (own, others, own + others)]
    c, d = shared_dimension(own, others), shared_dimension(own.T, others.T)
    bound = ranks[0] + ranks[1] - c - d
    assert bound <= ranks[2]
    return [ranks[0], ranks[1], c, d, bound, ranks[2]]


def measured(found):
    return torch.stack([found[name] for name in spectrum.BOUND[:-1]], 1).tolist()


MATRIX = torch.tensor([[1, 1, 0], [2, -1, 0], [0, 1, 0]])


@pytest.mark.parametrize("ranks", [(1, 2, 1), (2, 2, 4), (3, 1, 2), (5, 4, 1)])
def test_bound_is_that_of_exact_arithmetic(ranks):
    patterns = torch.stack([low_rank(seed, rank) for seed, rank in enumerate(ranks)])
    # a head that shares rows, and one that shares columns, with the first
    patterns[1, :2] = patterns[0, :2]
    patterns[2, :, 0] = patterns[0, :, 0]
    expected = []
    for i in range(3):
        own = MATRIX[i, i] * patterns[i]
        expected.append(exact(own, sum(MATRIX[j, i] * patterns[j] for j in range(3)) - own))
    assert measured(spectrum.rank_bound(patterns.float(), MATRIX.float())) == expected


def test_bound_of_a_matrix_for_each_query_is_exact():
    patterns, matrices = torch.stack([low_rank(seed, 2) for seed in range(3)]), integers(5, 3, 3, seed=9)
    expected = []
    for i in range(3):
        own = matrices[:, i, i, None] * patterns[i]
        expected.append(exact(own, sum(matrices[:, j, i, None] * patterns[j] for j in range(3)) - own))
    assert measured(spectrum.rank_bound(patterns.float(), matrices.float())) == expected


def test_tolerance_is_relative_to_the_largest_singular_value():
    matrix = torch.diag(torch.tensor([1.0, 1e-3, 1e-8]))[None]
    found = spectrum.rank_bound(1e4 * matrix)
    assert found["mixed_rank"].item() == found["bound"].item() == 2
    assert found["tolerance"].item() == pytest.approx(3 * torch.finfo(torch.float32).eps * 1e4)
    assert spectrum.rank_bound(matrix.double())["mixed_rank"].item() == 3


@pytest.mark.parametrize("name", ["mixhead-a", "mixhead-b", "stock"])
def test_patterns_before_mixing_give_the_layers_weights(trained, name):
    from fairseq_lowrank.tools.fairseq import checkpoints

    model, task = checkpoints.load_model(trained(name))
    for module in model.modules():  # two updates have hardly moved M
        if getattr(module, "mixing", None) is not None:
            for parameter in module.mixing.parameters():
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    (sample,) = checkpoints.sequences(task, "valid", count=1, seed=1, min_length=3, max_length=None)
    compared = 0

    def receive(layer, weights):
        nonlocal compared
        patterns, matrix = unmixed[layer.name]
        rule = StaticMixing if matrix.dim() == 2 else PositionwiseMixing
        mixed = rule(matrix).mix_heads(patterns.transpose(0, 1)).transpose(0, 1)
        torch.testing.assert_close(mixed, weights)
        torch.testing.assert_close(patterns.sum(-1), torch.ones(patterns.shape[:-1]))
        assert (mixed - patterns).abs().max() > 0.01
        compared += 1

    with torch.no_grad(), spectrum.before_mixing(model) as unmixed:
        if name == "stock":
            model(**sample["net_input"])
            assert not unmixed
            return
        with checkpoints.attention_weights(model, receive):
            model(**sample["net_input"])
    assert compared == {"mixhead-a": 6, "mixhead-b": 2}[name]
    assert all("operation" not in vars(module) for module in model.modules())


def test_spectrum_command_prints_the_bound(trained, tmp_path, capsys):
    checkpoints = [str(trained("mixhead-a")), str(trained("stock"))]
    flags = ["--labels", "a", "stock", "--sequences", "2", "--rank-bound"]
    assert cli.main(["inspect", "--spectrum", *checkpoints, *flags]) == 0
    header = capsys.readouterr().out.splitlines()[1]
    assert header.split()[-9:] == ["rank", "A", "rank", "B", "c", "d", "bound", "mixed", "rank"]
    assert cli.main(["inspect", "--spectrum", *checkpoints, *flags, "--json"]) == 0
    mixed, stock = json.loads(capsys.readouterr().out)
    for result in (mixed, stock):
        for site in result["sites"].values():
            for layer in site["layers"]:
                for head in layer["heads"]:
                    assert head["bound"] <= head["mixed_rank"] <= site["length"]
    assert mixed["sites"]["encoder"]["mean"]["others_rank"] > 0
    # without mixing the bound is the rank of the pattern itself
    of_stock = stock["sites"]["cross"]["mean"]
    assert of_stock["bound"] == of_stock["mixed_rank"] == of_stock["pattern_rank"] and of_stock["others_rank"] == 0
