"""Differences between rows: cases computed by hand, and coverage on data whose truth is known."""

import math

import numpy as np
import pytest

from experiments.reporting import statistics


def test_three_seeds_by_hand():
    # differences 1, 2, 3: mean 2, standard error 1/√3, t = 2√3 with two degrees of freedom
    result = statistics.compare({1: 4, 2: 6, 3: 8}, {1: 3, 2: 4, 3: 5})
    assert (result.mean, result.seed_means, result.positive) == (2, (1, 2, 3), 3)
    assert result.t == pytest.approx(2 * math.sqrt(3))
    # P(|t_2| > x) = 1 − x/√(2 + x²)
    assert result.t_p == pytest.approx(1 - math.sqrt(12 / 14))
    # of the eight choices of signs +++ and −−− have a mean as far from 0
    assert result.signs_p == pytest.approx(2 / 8)


def test_signs_by_hand_where_one_differs():
    # 3, 2, −1: means as far from 0 as theirs, 4/3, have the sums ±4 and ±6, and no others
    result = statistics.compare({1: 3, 2: 2, 3: -1}, dict.fromkeys((1, 2, 3), 0))
    assert (result.positive, result.signs_p) == (2, pytest.approx(4 / 8))


def test_the_bootstrap_of_two_seeds_has_three_means():
    means = statistics.bootstrap(np.array([[0.0], [2.0]]), draws=20_000)
    values, counts = np.unique(means, return_counts=True)
    assert values.tolist() == [0, 1, 2]
    np.testing.assert_allclose(counts / 20_000, [1 / 4, 1 / 2, 1 / 4], atol=0.015)


def test_the_bootstrap_has_the_variance_of_both_levels():
    # a seed's part a_i and a sentence's part b_j add up: the variance of a draw is var(a)/seeds + var(b)/sentences
    generator = np.random.default_rng(1)
    seeds, sentences = generator.normal(size=8), generator.normal(size=50) * 2
    means = statistics.bootstrap(seeds[:, None] + sentences)
    expected = seeds.var() / 8 + sentences.var() / 50
    assert means.var() == pytest.approx(expected, rel=0.05)
    # more seeds of one and the same difference do not make other sentences more alike
    alike = statistics.bootstrap(np.tile(sentences, (8, 1)))
    assert alike.var() == pytest.approx(sentences.var() / 50, rel=0.05)


@pytest.mark.parametrize("truth", [0.0, 0.7])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(truth):
    generator = np.random.default_rng(2)
    covered, rejected, trials = 0, 0, 300
    for _ in range(trials):
        seeds = generator.normal(size=(20, 1)) * 0.5
        sentences = generator.normal(size=(1, 60))
        matrix = truth + seeds + sentences + generator.normal(size=(20, 60)) * 0.3
        low, high, p = statistics.summary(statistics.bootstrap(matrix, draws=400))
        covered += low <= truth <= high
        rejected += p < 0.05
    assert 0.90 <= covered / trials <= 0.985
    if truth == 0:
        assert rejected / trials <= 0.1
    else:
        assert rejected / trials >= 0.9


def test_pairs_are_of_the_same_seed_and_sentence():
    first, second = {1: [1, 2], 2: [5, 5], 9: [0, 0]}, {2: [1, 2], 1: [0, 0]}
    seeds, matrix = statistics.differences(first, second)
    assert seeds == [1, 2]
    assert matrix.tolist() == [[1, 2], [4, 3]]


def test_what_cannot_be_paired_is_refused():
    with pytest.raises(ValueError, match=r"no common seed: \[1\] and \[2\]"):
        statistics.differences({1: 0}, {2: 0})
    with pytest.raises(ValueError, match="different sentences"):
        statistics.differences({1: [1, 2]}, {1: [1, 2, 3]})
    with pytest.raises(ValueError, match="infinite or not a number"):
        statistics.differences({1: math.nan}, {1: 0})
    with pytest.raises(ValueError, match="expected one a sentence"):
        statistics.differences({1: [[1, 2]]}, {1: [[1, 2]]})


def test_one_seed_says_nothing_of_seeds():
    result = statistics.compare({1: [1, 2, 3]}, {1: [0, 0, 0]})
    assert (result.seeds, result.sentences, result.mean) == (1, 3, 2)
    assert (result.signs_p, result.t, result.t_p) == (None, None, None)


def test_one_number_has_no_interval():
    result = statistics.compare({1: 3}, {1: 1})
    assert (result.mean, result.low, result.high, result.bootstrap_p) == (2, None, None, None)
    with pytest.raises(ValueError, match="no scores"):
        statistics.compare({1: []}, {1: []})


def test_equal_rows_and_rows_that_differ_by_a_constant():
    same = statistics.compare({1: 1, 2: 2}, {1: 1, 2: 2})
    assert (same.mean, same.low, same.high, same.bootstrap_p, same.t, same.t_p) == (0, 0, 0, 1, 0, 1)
    above = statistics.compare({1: 2, 2: 3}, {1: 1, 2: 2})
    assert (above.mean, above.t, above.t_p) == (1, math.inf, 0)


def test_an_interaction_is_a_difference_of_differences():
    a, b, c, d = ({1: 10, 2: 20}, {1: 1, 2: 2}, {1: 5, 2: 5}, {1: 4, 2: 2})
    assert statistics.compare_interaction((a, b), (c, d)).seed_means == (8, 15)


def test_holm_by_hand():
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.6, 0.6]) == [1, 1]
    # what was named and has no p is the last in order, with 1
    assert statistics.holm([0.02, None, 0.01]) == pytest.approx([0.04, None, 0.03])
    assert statistics.holm([0.02, 1, 0.01])[::2] == statistics.holm([0.02, None, 0.01])[::2]
    assert statistics.holm([]) == []


def test_the_same_seed_of_the_bootstrap_gives_the_same_interval():
    scores = {1: [1, 2, 3], 2: [0, 1, 5]}, {1: [0, 0, 1], 2: [2, 0, 0]}
    assert statistics.compare(*scores) == statistics.compare(*scores)
