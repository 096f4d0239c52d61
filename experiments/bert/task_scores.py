"""Scores of predictions for sentences: the measures of GLUE and SuperGLUE, in percent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

import numpy

Values = Sequence[float] | Sequence[str]


def accuracy(predictions: Values, targets: Values) -> float:
    """Return the share of correct predictions."""
    return fmean(one == other for one, other in zip(predictions, targets, strict=True))


def f1_of(positive: str) -> Callable[[Values, Values], float]:
    """Return a function for F1 of one class: 2·P·R / (P + R), and 0 if the class is neither a target nor predicted."""

    def f1(predictions: Values, targets: Values) -> float:
        pairs = zip(predictions, targets, strict=True)
        right = sum(one == other == positive for one, other in pairs)
        found = [*predictions].count(positive) + [*targets].count(positive)
        return 2 * right / found if found else 0.0

    return f1


def macro_f1(predictions: Values, targets: Values) -> float:
    """Return the mean of each class's F1."""
    return fmean(f1_of(label)(predictions, targets) for label in {*predictions, *targets})


def matthews(predictions: Values, targets: Values) -> float:
    """Return the correlation coefficient of Matthews, for any number of classes; 0 if all are predicted the same.

    It is the correlation of the classes' indicators (Gorodkin 2004): Σ_k cov(p_k, t_k) / √(Σ_k var(p_k) · Σ_k var(t_k)).
    """
    labels = sorted({*predictions, *targets})
    p, t = (numpy.array([[one == label for label in labels] for one in each], float) for each in (predictions, targets))
    p, t = p - p.mean(0), t - t.mean(0)
    spread = (p * p).sum() * (t * t).sum()
    return float((p * t).sum() / math.sqrt(spread)) if spread else 0.0


def pearson(predictions: Values, targets: Values) -> float:
    """Return the linear correlation; 0 if all predictions, or all targets, are the same."""
    if len(set(predictions)) < 2 or len(set(targets)) < 2:
        return 0.0
    return float(numpy.corrcoef(numpy.array(predictions), numpy.array(targets))[0, 1])


def spearman(predictions: Values, targets: Values) -> float:
    """Return the correlation of ranks; 0 if all predictions, or all targets, are the same."""
    return pearson(_ranks(predictions), _ranks(targets))


def _ranks(values: Values) -> list[float]:
    """Return the rank of each value; equal values have the mean of their ranks."""
    _, place, counts = numpy.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[place].tolist()


MEASURES: dict[str, Callable[[Values, Values], float]] = {
    "accuracy": accuracy,
    "f1": f1_of("1"),
    "macro-f1": macro_f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def measure(names: Sequence[str], predictions: Values, targets: Values) -> dict[str, float]:
    """Return the measures `names` of predictions, in percent.

    Raises:
        ValueError: there are no predictions, or their number differs from that of targets.
    """
    if not predictions or len(predictions) != len(targets):
        raise ValueError(
            f"{len(predictions)} predictions for {len(targets)} targets: expected one for each, and at least one"
        )
    return {name: 100 * float(MEASURES[name](predictions, targets)) for name in names}
