"""Rows of scores become rows of probabilities."""

import math

import pytest
import torch
import torch.nn.functional as F

from fairseq_lowrank.ops import sigsoftmax
from fairseq_lowrank.ops.activation import ACTIVATIONS, activate

HIDDEN = float("-inf")


def test_sigsoftmax_is_exp_times_sigmoid_normalised(device):
    scores = [-3.0, 0.5, 2.0, 11.0]
    terms = [math.exp(score) / (1 + math.exp(-score)) for score in scores]
    expected = torch.tensor([term / sum(terms) for term in terms], dtype=torch.float64)
    result = sigsoftmax(torch.tensor(scores, dtype=torch.float64, device=device), dim=0)
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("score", [-60.0, -41.0, -39.0, -10.0, -4.0, 3.0])
def test_sigsoftmax_in_place_is_the_softmax_of_its_logits(score, device):
    scores = score + torch.tensor([0.0, -1.5, -3.0], dtype=torch.float64, device=device)
    expected = torch.softmax(scores + F.logsigmoid(scores), dim=-1)
    weights, _ = ACTIVATIONS["sigsoftmax"].forward(scores, lambda name, *shape: scores.new_empty(shape))
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)


def test_sigsoftmax_normalises_the_named_dimension(device):
    scores = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).to(device)
    for dim in (0, 1, -1):
        torch.testing.assert_close(sigsoftmax(scores, dim).sum(dim), torch.ones_like(scores).mean(dim))
    assert torch.equal(sigsoftmax(scores, 1), sigsoftmax(scores.transpose(1, 2), 2).transpose(1, 2))


def test_sigsoftmax_of_a_constant_row_is_uniform_however_low_or_high(device):
    for score in (-1e4, -200.0, 200.0, 1e4):
        result = sigsoftmax(torch.full((4,), score, device=device), 0)
        torch.testing.assert_close(result.cpu(), torch.full((4,), 0.25))


@pytest.mark.parametrize("activation", ["softmax", "sigsoftmax"])
def test_a_row_of_very_low_scores_stays_finite_beside_hidden_ones(activation, device):
    scores = torch.tensor([HIDDEN, -300.0, -301.0], device=device, requires_grad=True)
    result = activate(scores, activation)
    result[1].backward()
    assert result[0] == 0
    torch.testing.assert_close(result.sum().item(), 1.0)
    # far below zero log σ(s) is s, so sigsoftmax doubles the differences
    gap = 1.0 if activation == "softmax" else 2.0
    torch.testing.assert_close((result[1] / result[2]).item(), math.exp(gap), rtol=1e-4, atol=0)
    assert scores.grad.isfinite().all() and scores.grad[0] == 0


@pytest.mark.parametrize("activation", ["softmax", "sigsoftmax"])
def test_a_fully_hidden_row_gives_zeros_and_no_gradient(activation, device):
    scores = torch.tensor([[HIDDEN, HIDDEN], [1.0, 2.0]], device=device, requires_grad=True)
    result = activate(scores, activation)
    (result * torch.tensor([3.0, 5.0], device=device)).sum().backward()
    assert result[0].tolist() == [0, 0]
    torch.testing.assert_close(result[1].sum().item(), 1.0)
    assert scores.grad[0].tolist() == [0, 0]
    assert scores.grad[1].isfinite().all() and scores.grad[1].abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ["softmax", "sigsoftmax"])
def test_half_precision_scores_are_normalised_in_float32(activation, dtype, device):
    scores = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    result = activate(scores, activation)
    assert result.dtype == torch.float32
    exact = activate(scores.double(), activation)
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=0)
    assert sigsoftmax(scores).dtype == dtype


def test_an_unknown_activation_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="activation='relu': expected one of softmax, sigsoftmax"):
        activate(torch.zeros(2), "relu")
