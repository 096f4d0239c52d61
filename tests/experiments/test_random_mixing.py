"""Spectra of what heads would be with another M: the control of what is said of the learned one."""

import json

import pytest
import torch

from experiments import __main__ as experiments
from experiments import random_mixing
from fairseq_lowrank import cli
from fairseq_lowrank.messages import UserError


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


def learned(heads=4):
    return torch.eye(heads) * 0.6 + 0.2 * torch.randn(heads, heads, generator=generator())


def test_without_mixing_the_patterns_are_those_of_the_softmax():
    patterns = torch.rand(4, 1, 5, 7, generator=generator()).softmax(-1)
    mixed = torch.einsum("jhst,ji->ihst", patterns, learned())
    found = random_mixing.controls(mixed, learned(), generator())
    assert tuple(found) == random_mixing.CONTROLS
    torch.testing.assert_close(found["without mixing"], patterns.double(), atol=1e-5, rtol=0)


def test_a_random_m_is_as_far_from_the_identity_or_has_the_diagonal_and_as_much_beside_it():
    matrix = learned().double()
    # patterns that are unit vectors: mixed head i is column i of M
    found = random_mixing.controls(matrix.t(), matrix, generator())
    other, off_diagonal = (found[name].t() for name in ("random M", "random off-diagonal"))
    identity = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(found["without mixing"], identity)
    assert (other - identity).norm().item() == pytest.approx((matrix - identity).norm().item())
    assert (other - matrix).norm() > 0.1
    torch.testing.assert_close(off_diagonal.diagonal(), matrix.diagonal())

    def off(m):
        return (m - torch.diag(m.diagonal())).norm().item()

    assert off(off_diagonal) == pytest.approx(off(matrix)) and (off_diagonal - matrix).norm() > 0.1
    again = random_mixing.controls(matrix.t(), matrix, generator(2))
    assert not torch.equal(again["random M"], found["random M"])


def test_shuffling_loses_which_head_is_taken_and_nothing_else():
    matrix = learned(6).double()
    shuffled = random_mixing.controls(matrix.t(), matrix, generator())["shuffled off-diagonal"].t()
    torch.testing.assert_close(shuffled.diagonal(), matrix.diagonal())
    torch.testing.assert_close(shuffled.sort(0).values, matrix.sort(0).values)
    assert (shuffled != matrix).any(0).all()
    others = [
        random_mixing.controls(matrix.t(), matrix, generator(seed))["shuffled off-diagonal"] for seed in range(40)
    ]
    # whatever a mixed head took of another, it takes of each of them as often
    off = [i for i in range(6) if i != 2]
    mean = torch.stack(others).mean(0).t()
    assert (mean[off, 2] - matrix[off, 2].mean()).abs().max() < 0.12 < matrix[off, 2].std()


def test_mixing_that_is_only_a_factor_has_nothing_off_the_diagonal_to_draw():
    matrix = torch.diag(torch.tensor([0.5, 2.0]))
    found = random_mixing.controls(matrix.t(), matrix, generator())
    for name in ("random off-diagonal", "shuffled off-diagonal"):
        torch.testing.assert_close(found[name].t(), matrix.double())


def test_mixing_that_cannot_be_undone_is_refused():
    with pytest.raises(UserError, match="M of 3 heads is singular"):
        random_mixing.controls(torch.ones(3, 1, 2, 2), torch.full((3, 3), 1 / 3), generator())


def test_the_command_shows_the_controls_of_a_checkpoint(trained, capsys):
    flags = ["--sequences", "3", "--json"]
    assert experiments.main(["random-mixing", str(trained("mixhead-a")), "--labels", "a", *flags]) == 0
    results = {result["label"]: result for result in json.loads(capsys.readouterr().out)}
    assert list(results) == ["a", *(f"a, {name}" for name in random_mixing.CONTROLS)]
    assert cli.main(["inspect", "--spectrum", str(trained("mixhead-a")), "--labels", "a", *flags]) == 0
    (alone,) = json.loads(capsys.readouterr().out)
    assert alone == results["a"]
    ranks = {label: result["sites"]["encoder"]["mean"]["effective_rank"] for label, result in results.items()}
    assert len(set(ranks.values())) == 1 + len(random_mixing.CONTROLS)


def test_checkpoints_without_static_mixing_have_no_controls(trained, capsys):
    assert experiments.main(["random-mixing", str(trained("stock")), "--sequences", "1"]) == 2
    assert "no checkpoint has one M" in capsys.readouterr().err.splitlines()[-1]
