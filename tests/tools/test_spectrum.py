import math

import pytest
import torch

from fairseq_lowrank.tools import spectrum


def orthogonal(n, seed=0):
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))[0]


def with_singular_values(values, n):
    values = torch.tensor(values, dtype=torch.float64)
    return orthogonal(n, 1)[:, : len(values)] * values @ orthogonal(n, 2)[:, : len(values)].T


def test_singular_values_of_a_batch_are_those_of_each_matrix():
    matrices = torch.stack([with_singular_values([3.0, 2.0, 1.0], 5), with_singular_values([4.0], 5)]).view(2, 1, 5, 5)
    expected = torch.tensor([[[3.0, 2.0, 1.0, 0, 0]], [[4.0, 0, 0, 0, 0]]], dtype=torch.float64)
    torch.testing.assert_close(spectrum.singular_values(matrices), expected, atol=1e-12, rtol=0)


def test_zero_padding_adds_only_zeros_to_the_spectrum():
    small = torch.rand(4, 6, dtype=torch.float64)
    padded = torch.zeros(7, 9, dtype=torch.float64)
    padded[:4, 3:] = small
    torch.testing.assert_close(spectrum.singular_values(padded)[:4], spectrum.singular_values(small))
    assert spectrum.singular_values(padded)[4:].abs().max() < 1e-12


def test_half_precision_matrices_have_a_spectrum():
    assert spectrum.singular_values(torch.eye(4, dtype=torch.bfloat16)).tolist() == [1.0] * 4


def test_equal_singular_values_give_full_rank_and_the_diagonal():
    values = spectrum.singular_values(orthogonal(8))
    measures = spectrum.measures(values, head_dim=2)
    assert measures["effective_rank"].item() == pytest.approx(8)
    assert measures["rank_share"].item() == pytest.approx(1)
    assert measures["area"].item() == pytest.approx(0.5)
    assert measures["mass_in_head_dim"].item() == pytest.approx(0.25)
    torch.testing.assert_close(spectrum.cumulative_curve(values), torch.linspace(0, 1, 9, dtype=torch.float64))


def test_uniform_attention_has_rank_one():
    values = spectrum.singular_values(torch.full((10, 10), 0.1, dtype=torch.float64))
    measures = spectrum.measures(values, head_dim=1)
    assert measures["effective_rank"].item() == pytest.approx(1)
    assert measures["area"].item() == pytest.approx(1 - 1 / 20)
    assert measures["mass_in_head_dim"].item() == pytest.approx(1)


def test_effective_rank_is_the_exponential_of_the_entropy():
    values = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    assert spectrum.effective_rank(values).item() == pytest.approx(math.exp(1.5 * math.log(2)))
    assert spectrum.effective_rank(7 * values).item() == pytest.approx(math.exp(1.5 * math.log(2)))


def test_an_all_zero_matrix_gives_no_nan():
    measures = spectrum.measures(spectrum.singular_values(torch.zeros(2, 3, 3)), head_dim=1)
    assert all(torch.isfinite(value).all() for value in measures.values())


def test_resampling_keeps_the_ends_and_straight_lines():
    curve = torch.linspace(0, 1, 7, dtype=torch.float64).expand(2, 3, 7)
    torch.testing.assert_close(spectrum.resample(curve, 11)[1, 2], torch.linspace(0, 1, 11, dtype=torch.float64))
    step = spectrum.resample(torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0]), 101)
    assert step[0] == 0 and step[-1] == 1 and step[25].item() == pytest.approx(1)


def test_mass_in_no_singular_values_is_refused():
    with pytest.raises(ValueError, match="count=0"):
        spectrum.mass_in_first(torch.ones(3), 0)
