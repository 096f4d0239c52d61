"""Measures of sentence tasks against their formulas, worked by hand."""

import math

import numpy
import pytest

from experiments.bert.task_scores import measure


def test_accuracy_f1_and_matthews_of_a_table_of_four():
    # 3 true positives, 1 false positive, 2 false negatives, 4 true negatives
    predictions = ["1"] * 3 + ["1"] + ["0"] * 2 + ["0"] * 4
    targets = ["1"] * 3 + ["0"] + ["1"] * 2 + ["0"] * 4
    scores = measure(["accuracy", "f1", "matthews", "macro-f1"], predictions, targets)
    assert scores["accuracy"] == pytest.approx(70)
    assert scores["f1"] == pytest.approx(100 * 2 * 3 / (2 * 3 + 1 + 2))
    assert scores["matthews"] == pytest.approx(100 * (3 * 4 - 1 * 2) / math.sqrt(4 * 5 * 5 * 6))
    assert scores["macro-f1"] == pytest.approx(100 * (6 / 9 + 8 / 11) / 2)


def test_correlations():
    scores = measure(["pearson", "spearman"], [1.0, 2.0, 10.0], [1.0, 2.0, 3.0])
    # covariance 9 of deviations (-10/3, -7/3, 17/3) and (-1, 0, 1)
    assert scores["pearson"] == pytest.approx(100 * 9 / math.sqrt((100 + 49 + 289) / 9 * 2))
    assert scores["spearman"] == pytest.approx(100)


def test_predictions_that_are_all_the_same_are_worth_nothing_but_a_number():
    assert measure(["pearson", "spearman"], [1.0, 1.0], [1.0, 2.0]) == {"pearson": 0, "spearman": 0}
    assert measure(["matthews", "f1"], ["0", "0"], ["1", "0"]) == {"matthews": 0, "f1": 0}


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="1 predictions for 2 targets"):
        measure(["accuracy"], ["0"], ["0", "1"])


def test_measures_of_drawn_predictions_are_those_of_libraries():
    metrics = pytest.importorskip("sklearn.metrics")
    stats = pytest.importorskip("scipy.stats")
    random = numpy.random.default_rng(1)
    for classes in (2, 3):
        predictions, targets = (random.integers(0, classes, 40).astype(str).tolist() for _ in range(2))
        scores = measure(["accuracy", "f1", "macro-f1", "matthews"], predictions, targets)
        assert scores["accuracy"] == pytest.approx(100 * metrics.accuracy_score(targets, predictions))
        assert scores["macro-f1"] == pytest.approx(100 * metrics.f1_score(targets, predictions, average="macro"))
        assert scores["matthews"] == pytest.approx(100 * metrics.matthews_corrcoef(targets, predictions))
        assert scores["f1"] == pytest.approx(
            100 * metrics.f1_score(targets, predictions, labels=["1"], average="macro", zero_division=0)
        )
    predictions, targets = (random.integers(0, 6, 40).astype(float).tolist() for _ in range(2))  # with ties
    scores = measure(["pearson", "spearman"], predictions, targets)
    assert scores["pearson"] == pytest.approx(100 * stats.pearsonr(predictions, targets).statistic)
    assert scores["spearman"] == pytest.approx(100 * stats.spearmanr(predictions, targets).statistic)
