"""Differences between rows: cases computed by hand, and coverage on data whose truth is known."""

import math

import numpy as np
import pytest

from experiments.equivalence import equivalence_p
from experiments.evidence.coverage import coverage
from fairseq_lowrank.records import statistics


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


@pytest.mark.parametrize(("seeds", "width"), [(2, 12.7062), (3, 4.3027), (5, 2.7764)])
def test_interval_is_students_for_the_number_of_seeds(seeds, width):
    values = [1.0, *[0.0] * (seeds - 2), -1.0]
    error = math.sqrt(2 / (seeds - 1) / seeds)
    low, high, *_ = statistics.student(values)
    assert (low, high) == pytest.approx((-width * error, width * error), rel=1e-4)


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_interval_of_few_seeds_covers_as_often_as_it_says(seeds):
    draws = np.random.default_rng(seeds).normal(0.7, 1.0, size=(1000, seeds))
    intervals = [statistics.student(values)[:2] for values in draws]
    covered = sum(low <= 0.7 <= high for low, high in intervals)
    assert 930 <= covered <= 970


def test_p_of_three_seeds_of_one_sign_is_not_tiny():
    result = statistics.compare({1: 1.0, 2: 0.2, 3: 0.4}, {1: 0, 2: 0, 3: 0})
    assert result.t_p == pytest.approx(0.1567, abs=1e-4)
    assert result.low < 0 < result.high


def test_sentence_bootstrap_has_the_variance_of_sentences():
    # a seed's part moves all sentences of that seed, and says nothing of other sentences
    generator = np.random.default_rng(1)
    seeds, sentences = generator.normal(size=3) * 5, generator.normal(size=200)
    result = statistics.compare_matrix(seeds[:, None] + sentences)
    low, high = result.sentences_low, result.sentences_high
    assert high - low == pytest.approx(2 * 1.96 * sentences.std() / math.sqrt(200), rel=0.1)
    assert (low + high) / 2 == pytest.approx(seeds.mean() + sentences.mean(), abs=0.05)


def test_mixed_interval_is_students_where_sentences_do_not_differ():
    result = statistics.compare_matrix(np.repeat([[1.0], [2.0], [4.0]], 5, axis=1))
    assert (result.both_low, result.both_high) == pytest.approx((result.low, result.high))


def test_mixed_interval_is_that_of_sentences_where_seeds_do_not_differ():
    sentences = np.random.default_rng(4).normal(1, 2, size=200)
    result = statistics.compare_matrix(np.tile(sentences, (3, 1)))
    reach = statistics.t_quantile(0.975, 100) * sentences.std(ddof=1) / math.sqrt(200)
    assert (result.both_high - result.both_low) / 2 == pytest.approx(reach)


def test_mixed_estimate_by_hand():
    # means of seeds 0, 1, 5 and of sentences 1, 3; what is left is ±1 for the first two seeds, 0 for the third
    matrix = np.array([[-2.0, 2.0], [1.0, 1.0], [4.0, 6.0]])
    of_seeds, of_sentences, of_rest = 2 * 7.0, 3 * 2.0, (1 + 1 + 1 + 1) / 2
    error, degrees = statistics.seeds_and_sentences(matrix)
    total = of_seeds + of_sentences - of_rest
    assert error == pytest.approx(math.sqrt(total / 6))
    assert degrees == pytest.approx(total**2 / (of_seeds**2 / 2 + of_sentences**2 / 1 + of_rest**2 / 2))
    errors, more = statistics.seeds_and_sentences(np.stack([matrix, 2 * matrix]))
    assert errors == pytest.approx(np.array([1, 2]) * error) and more == pytest.approx(np.array([1, 1]) * degrees)


@pytest.mark.parametrize("tails", [False, True])
def test_mixed_interval_covers_other_seeds_and_sentences_where_others_do_not(tails):
    found = coverage(5, 200, 5.0, tails=tails, draws=1000)
    assert 0.925 < found.over_both < 0.975 and found.over_seeds < 0.8 and found.over_sentences < 0.94


def test_mixed_interval_needs_three_seeds_and_two_sentences():
    assert statistics.compare_matrix(np.arange(20.0).reshape(2, 10)).both_low is None
    assert statistics.compare_matrix(np.arange(3.0)[:, None]).both_low is None


def test_mixed_interval_of_bleu_has_the_variance_of_sentences():
    generator = np.random.default_rng(5)
    matches = generator.integers(3, 9, size=(300, 4))
    counts = np.concatenate([np.full((300, 2), 10), np.minimum.accumulate(matches, -1), np.full((300, 4), 9)], -1)
    worse = counts - [0, 0, 1, 1, 1, 1, 0, 0, 0, 0] * (generator.random((300, 1)) < 0.5)
    result = statistics.compare_counts([dict.fromkeys((1, 2, 3), counts), dict.fromkeys((1, 2, 3), worse)])
    assert result.both_low < result.mean < result.both_high
    width = result.sentences_high - result.sentences_low
    assert result.both_high - result.both_low == pytest.approx(width, rel=0.05)


def test_p_over_sentences_is_that_of_a_normal_mean():
    sentences = np.random.default_rng(2).normal(0.3, 2, size=(1, 400))
    result = statistics.compare_matrix(sentences)
    z = abs(sentences.mean()) / (sentences.std() / math.sqrt(400))
    assert result.sentences_p == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.02)


@pytest.mark.parametrize("draws", [99, 10_000])
def test_p_over_sentences_counts_the_observed_difference_too(draws):
    # no draw of these sentences is as far from the mean as the mean is from 0
    sentences = 1 + np.linspace(-0.1, 0.1, 50)[None]
    assert statistics.compare_matrix(sentences, draws=draws).sentences_p == pytest.approx(1 / (draws + 1), rel=1e-9)


def test_p_of_signs_counts_the_observed_choice_too():
    # of 2^40 choices none that is drawn has a sum as far from 0
    result = statistics.compare_matrix(np.ones((40, 1)))
    assert result.signs_p == pytest.approx(1 / (statistics.DRAWS + 1), rel=1e-9)


def test_each_empty_order_of_bleu_halves_once_more_by_hand():
    # precisions: 2 of 6, then 1/2 of 5, 1/4 of 4, 1/8 of 3
    expected = 100 * (2 / 6 * 1 / 2 / 5 * 1 / 4 / 4 * 1 / 8 / 3) ** 0.25
    assert statistics.bleu(np.array([6, 6, 2, 0, 0, 0, 6, 5, 4, 3])) == pytest.approx(expected)
    # a match of order 4 after two empty orders
    expected = 100 * (2 / 6 * 1 / 2 / 5 * 1 / 4 / 4 * 1 / 3) ** 0.25
    assert statistics.bleu(np.array([6, 6, 2, 0, 0, 1, 6, 5, 4, 3])) == pytest.approx(expected)


# Lengths of hypothesis and reference, matches of orders 1 to 4, and all n-grams of these orders.
COUNTS = [[6, 7, 5, 3, 2, 1, 6, 5, 4, 3], [9, 9, 9, 8, 7, 6, 9, 8, 7, 6], [3, 5, 1, 0, 0, 0, 3, 2, 1, 0]]
EMPTY = [6, 6, 2, 0, 0, 0, 6, 5, 4, 3]


@pytest.mark.parametrize("chosen", [[0, 1, 2], [2], [0, 2, 2], [2, 2], [3], [3, 3]])
def test_bleu_of_counts_is_sacrebleus(chosen):
    sacrebleu = pytest.importorskip("sacrebleu")
    sums = np.array([*COUNTS, EMPTY])[chosen].sum(0)
    lengths = {"sys_len": int(sums[0]), "ref_len": int(sums[1])}
    expected = sacrebleu.BLEU.compute_bleu(sums[2:6].tolist(), sums[6:].tolist(), **lengths, smooth_method="exp")
    assert statistics.bleu(sums) == pytest.approx(expected.score)
    assert statistics.bleu(np.stack([sums, 0 * sums])).tolist() == pytest.approx([expected.score, 0])


def test_bleu_is_compared_by_adding_up_the_counts_of_sentences():
    worse = [[*one[:2], *(max(0, number - 1) for number in one[2:6]), *one[6:]] for one in COUNTS]
    result = statistics.compare_counts([{1: COUNTS, 2: COUNTS, 3: COUNTS}, {1: COUNTS, 2: worse}])
    difference = statistics.bleu(np.sum(COUNTS, 0)) - statistics.bleu(np.sum(worse, 0))
    assert result.seed_means == pytest.approx((0, difference)) and result.sentences == 3
    assert result.sentences_low < result.mean < result.sentences_high and 0 < result.sentences_p < 1
    both = statistics.compare_counts([{1: COUNTS}, {1: worse}, {1: COUNTS}, {1: worse}])
    assert (both.mean, both.sentences_low, both.sentences_high) == (0, 0, 0)
    with pytest.raises(ValueError, match="on the same sentences"):
        statistics.compare_counts([{1: COUNTS}, {1: COUNTS[:2]}])
    with pytest.raises(ValueError, match=r"no common seed: \[1\] and \[2\]"):
        statistics.compare_counts([{1: COUNTS}, {2: COUNTS}])


def test_sentence_interval_needs_sentence_values():
    result = statistics.compare({1: 1.0, 2: 2.0}, {1: 0.0, 2: 0.0})
    assert (result.sentences, result.sentences_low, result.sentences_high) == (1, None, None)


def test_equivalence_by_hand():
    # mean 0, standard error 1/√3, margin 2: t = 2√3 on either side, two degrees of freedom
    assert equivalence_p([-1, 0, 1], 2.0) == pytest.approx((1 - math.sqrt(12 / 14)) / 2)
    # a mean at the margin is as likely outside as inside
    assert equivalence_p([1, 2, 3], 2.0) == pytest.approx(0.5)
    assert equivalence_p([-3, -2, -1], 2.0) == pytest.approx(0.5)
    assert equivalence_p([0.5, 0.5], 1.0) == 0
    assert equivalence_p([0.5, 0.5], 0.5) == 1
    assert equivalence_p([0.5], 1.0) is None
    with pytest.raises(ValueError, match="margin 0"):
        equivalence_p([0, 0], 0)


def test_equivalence_at_the_margin_is_claimed_one_time_in_twenty():
    # the true difference is the margin, so that each claim of "within" is wrong
    draws = np.random.default_rng(3).normal(0.5, 0.1, size=(1000, 3))
    claimed = sum(equivalence_p(list(values), 0.5) < 0.05 for values in draws)
    assert 30 <= claimed <= 70


def test_pairs_are_of_the_same_seed_and_sentence():
    first, second = {1: [1, 2], 2: [5, 5], 9: [0, 0]}, {2: [1, 2], 1: [0, 0]}
    seeds, matrix = statistics.paired_differences(first, second)
    assert seeds == [1, 2]
    assert matrix.tolist() == [[1, 2], [4, 3]]


def test_what_cannot_be_paired_is_refused():
    with pytest.raises(ValueError, match=r"no common seed: \[1\] and \[2\]"):
        statistics.paired_differences({1: 0}, {2: 0})
    with pytest.raises(ValueError, match="on the same sentences"):
        statistics.paired_differences({1: [1, 2]}, {1: [1, 2, 3]})
    with pytest.raises(ValueError, match="infinite or not a number"):
        statistics.paired_differences({1: math.nan}, {1: 0})
    with pytest.raises(ValueError, match="expected one per sentence"):
        statistics.paired_differences({1: [[1, 2]]}, {1: [[1, 2]]})


def test_one_seed_says_nothing_of_seeds():
    result = statistics.compare({1: [1, 2, 3]}, {1: [0, 0, 0]})
    assert (result.seeds, result.sentences, result.mean) == (1, 3, 2)
    assert (result.signs_p, result.low, result.high, result.t, result.t_p) == (None,) * 5
    assert result.sentences_low < 2 < result.sentences_high


def test_one_number_has_no_interval():
    result = statistics.compare({1: 3}, {1: 1})
    assert (result.mean, result.low, result.sentences_low) == (2, None, None)
    with pytest.raises(ValueError, match="no scores"):
        statistics.compare({1: []}, {1: []})


def test_equal_rows_and_rows_that_differ_by_a_constant():
    same = statistics.compare({1: 1, 2: 2}, {1: 1, 2: 2})
    assert (same.mean, same.low, same.high, same.t, same.t_p) == (0, 0, 0, 0, 1)
    above = statistics.compare({1: 2, 2: 3}, {1: 1, 2: 2})
    assert (above.mean, above.low, above.high, above.t, above.t_p) == (1, 1, 1, math.inf, 0)


def test_differences_that_are_equal_after_rounding_have_the_resolution_as_their_error():
    # 12.34 − 12.31 and 15.67 − 15.64 differ in their last bits
    values = [12.34 - 12.31, 15.67 - 15.64, 0.03]
    low, high, t, p = statistics.student(values, resolution=0.01)
    assert t == pytest.approx(3) and p == pytest.approx(1 - 3 / math.sqrt(11)) and low < 0 < high
    assert equivalence_p(values, 0.06, resolution=0.01) == pytest.approx(p / 2)
    assert statistics.student([1, 2, 3], resolution=0.01) == statistics.student([1, 2, 3])


def test_values_a_step_apart_are_not_equal_after_rounding():
    assert statistics.equal_after_rounding([0.03, 0.034], 0.01)
    assert not statistics.equal_after_rounding([0.03, 0.036], 0.01)


def test_sentences_of_equal_means_bring_no_degrees_of_freedom():
    error, degrees = statistics.seeds_and_sentences(np.array([[3.0, 1.0], [0.0, 2.0]]))
    assert (error, degrees) == pytest.approx((0.5, 1.0))  # those of the two seeds' means, 2 and 1


def test_degrees_of_freedom_are_rounded_down():
    assert [statistics.whole_degrees(degrees) for degrees in (0.5, 2.9, 3.0, 500.0)] == [1, 2, 3, 100]


def test_the_jackknife_of_a_mean_has_the_values_of_the_sentences():
    generator = np.random.default_rng(1)
    rows = [{seed: generator.normal(size=5) for seed in (1, 2, 3)} for _ in range(2)]
    counts = [{seed: np.stack([scores, np.ones(5)], axis=1) for seed, scores in row.items()} for row in rows]
    found = statistics.compare_counts(counts, lambda sums: sums[..., 0] / sums[..., 1])
    expected = statistics.compare(*rows)
    assert (found.both_low, found.both_high) == pytest.approx((expected.both_low, expected.both_high))


def test_probabilities_of_t_are_those_of_the_book():
    # Abramowitz and Stegun, table 26.10: quantiles of Student's t
    known = {1: (3.078, 12.706), 2: (1.886, 4.303), 5: (1.476, 2.571), 10: (1.372, 2.228), 30: (1.310, 2.042)}
    for degrees, quantiles in known.items():
        for probability, quantile in zip((0.9, 0.975), quantiles, strict=True):
            assert statistics.t_quantile(probability, degrees) == pytest.approx(quantile, abs=6e-4)
            assert statistics.t_below(-quantile, degrees) == pytest.approx(1 - probability, abs=1e-4)


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
