"""What predictions of sentences are worth: the measures of GLUE and SuperGLUE, in percent."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

Values = Sequence[float] | Sequence[str]


def accuracy(predictions: Values, targets: Values) -> float:
    """The share that is right."""
    from sklearn.metrics import accuracy_score

    return accuracy_score(targets, predictions)


def f1_of(positive: str) -> Callable[[Values, Values], float]:
    """F1 of one class: 2·P·R / (P + R); 0 where it is neither there nor predicted."""

    def f1(predictions: Values, targets: Values) -> float:
        from sklearn.metrics import f1_score

        return f1_score(targets, predictions, pos_label=positive, average="binary", zero_division=0)

    return f1


def macro_f1(predictions: Values, targets: Values) -> float:
    """The mean of each class's F1."""
    from sklearn.metrics import f1_score

    return f1_score(targets, predictions, average="macro", zero_division=0)


def matthews(predictions: Values, targets: Values) -> float:
    """The correlation coefficient of Matthews; 0 where all are predicted the same."""
    from sklearn.metrics import matthews_corrcoef

    return matthews_corrcoef(targets, predictions)


def pearson(predictions: Values, targets: Values) -> float:
    """The linear correlation; 0 where all predictions, or all targets, are the same."""
    from scipy.stats import pearsonr

    return _correlation(pearsonr, predictions, targets)


def spearman(predictions: Values, targets: Values) -> float:
    """The correlation of ranks; 0 where all predictions, or all targets, are the same."""
    from scipy.stats import spearmanr

    return _correlation(spearmanr, predictions, targets)


def _correlation(function: Callable, predictions: Values, targets: Values) -> float:
    if len(set(predictions)) < 2 or len(set(targets)) < 2:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(function(predictions, targets).statistic)


MEASURES: dict[str, Callable[[Values, Values], float]] = {
    "accuracy": accuracy,
    "f1": f1_of("1"),
    "macro-f1": macro_f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def measure(names: Sequence[str], predictions: Values, targets: Values) -> dict[str, float]:
    """The measures `names` of predictions, in percent.

    Raises:
        ValueError: there are none, or not as many as targets.
    """
    if not predictions or len(predictions) != len(targets):
        raise ValueError(f"{len(predictions)} predictions for {len(targets)} targets")
    return {name: 100 * float(MEASURES[name](predictions, targets)) for name in names}
