"""Tests of differences between two rows, paired by seed and sentence.

Two rows are compared on common seeds (the same order of data and, if shapes allow, the same initial parameters) and on the same
sentences. Each test answers a different question:

- **Student's t** (other seeds): interval and p of the seeds' mean differences, on this test set. With few seeds the interval is
  long, but its coverage is right. A bootstrap over three seeds covers the truth in only 75 % of cases.
- **bootstrap over sentences** (other test sentences): for these trainings. It needs one value per sentence.
- **all signs**: if the two rows were equal, each seed's difference could have the other sign. The p-value is the share of all
  2^seeds choices of signs whose mean is as far from 0. It cannot be below 2 / 2^seeds.
- **equivalence**: two one-sided t-tests (TOST) against a margin that was stated. "No difference" needs this test: a p of
  difference above 0.05 only means that no difference was found.

For several planned contrasts :func:`holm` corrects the p-values.

BLEU is not a mean over sentences. For BLEU use sacrebleu's own tests, ``sacrebleu REFERENCES -i A B --paired-bs``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairseq_lowrank.messages import UserError

DRAWS = 10_000
CONFIDENCE = 0.95

Scores = Mapping[int, ArrayLike]
"""By seed: a row's score, or its scores of sentences, in the same order for all rows and seeds."""


@dataclass(frozen=True)
class Comparison:
    """The result of a contrast. Values that need two seeds, or two sentences, are ``None`` if there is one.

    Args:
        mean: mean difference over seeds and sentences.
        low, high: Student's 95 % interval of the seeds' means.
        t, t_p: Student's t of the seeds' means and its two-sided p.
        seeds, sentences: their numbers.
        seed_means: the mean difference of each seed.
        positive: the number of seeds whose mean difference is above 0.
        signs_p: the two-sided p over all choices of signs.
        sentences_low, sentences_high: the bootstrap's 95 % interval over sentences, for these trainings.
    """

    mean: float
    low: float | None
    high: float | None
    t: float | None
    t_p: float | None
    seeds: int
    sentences: int
    seed_means: tuple[float, ...]
    positive: int
    signs_p: float | None
    sentences_low: float | None
    sentences_high: float | None


def paired_differences(first: Scores, second: Scores) -> tuple[list[int], NDArray]:
    """Return the common seeds, and first − second for them, ``[seeds, sentences]``.

    Raises:
        UserError: there is no common seed, or the numbers of sentences differ.
    """
    seeds = sorted(set(first) & set(second))
    if not seeds:
        raise UserError(f"no common seed: {sorted(first)} and {sorted(second)}")
    rows = [[np.atleast_1d(np.asarray(scores[seed], dtype=float)) for scores in (first, second)] for seed in seeds]
    shapes = sorted({score.shape for pair in rows for score in pair})
    if len(shapes) > 1:
        raise UserError(f"scores of different sentences cannot be paired: their shapes are {shapes}")
    if len(shapes[0]) != 1:
        raise UserError(f"scores of shape {shapes[0]}: expected one per sentence")
    matrix = np.stack([one - other for one, other in rows])
    if not np.isfinite(matrix).all():
        raise UserError("a score is infinite or not a number")
    return seeds, matrix


def sentence_interval(matrix: NDArray, *, draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """Return the bootstrap's 95 % interval over the columns of ``[seeds, sentences]``.

    A draw of sentences is used for all seeds, because a sentence that is easy for one seed is easy for every seed.
    """
    generator = np.random.default_rng(seed)
    values = matrix.mean(0)
    means = np.empty(draws)
    for start in range(0, draws, 500):  # all draws at once would need much memory
        chosen = generator.integers(0, len(values), (min(500, draws - start), len(values)))
        means[start : start + 500] = values[chosen].mean(1)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(means, (tail, 100 - tail))
    return float(low), float(high)


def compare_matrix(matrix: NDArray, *, draws: int = DRAWS, seed: int = 0) -> Comparison:
    """Compute all statistics of paired differences ``[seeds, sentences]``.

    Raises:
        ValueError: there are no differences.
    """
    if not matrix.size:
        raise ValueError("no scores: a comparison needs at least one")
    by_seed = matrix.mean(1)
    low, high, t, t_p = student(by_seed)
    sentences = sentence_interval(matrix, draws=draws, seed=seed) if matrix.shape[1] > 1 else (None, None)
    return Comparison(
        mean=float(matrix.mean()),
        low=low,
        high=high,
        t=t,
        t_p=t_p,
        seeds=matrix.shape[0],
        sentences=matrix.shape[1],
        seed_means=tuple(map(float, by_seed)),
        positive=int((by_seed > 0).sum()),
        signs_p=_all_signs(by_seed, seed),
        sentences_low=sentences[0],
        sentences_high=sentences[1],
    )


def compare(first: Scores, second: Scores, *, draws: int = DRAWS, seed: int = 0) -> Comparison:
    """Compare first − second, paired by seed and sentence.

    Raises:
        UserError: see :func:`paired_differences`.
    """
    return compare_matrix(paired_differences(first, second)[1], draws=draws, seed=seed)


def compare_interaction(
    first: tuple[Scores, Scores], second: tuple[Scores, Scores], *, draws: int = DRAWS, seed: int = 0
) -> Comparison:
    """Compare (a − b) − (c − d), paired by seed and sentence: does the lead of a over b differ from that of c over d?

    Raises:
        UserError: see :func:`paired_differences`.
    """
    inner = [dict(zip(*paired_differences(*pair), strict=True)) for pair in (first, second)]
    return compare(*inner, draws=draws, seed=seed)


def student(values: ArrayLike) -> tuple[float, float, float, float] | tuple[None, None, None, None]:
    """Return the 95 % interval of the mean, t and its two-sided p; ``None`` four times for fewer than two values."""
    values = np.asarray(values, dtype=float)
    if len(values) < 2:
        return None, None, None, None
    mean = float(values[0])
    if np.ptp(values) == 0:  # all values are equal
        return (0.0, 0.0, 0.0, 1.0) if mean == 0 else (mean, mean, math.copysign(math.inf, mean), 0.0)
    mean, error = float(values.mean()), _standard_error(values)
    reach, t = t_quantile((1 + CONFIDENCE) / 2, len(values) - 1) * error, mean / error
    return mean - reach, mean + reach, t, 2 * t_below(-abs(t), len(values) - 1)


def equivalence_p(values: Sequence[float], margin: float) -> float | None:
    """Return the p of two one-sided t-tests that the mean lies within ± margin; ``None`` for fewer than two values.

    Raises:
        ValueError: the margin is not above 0.
    """
    if not margin > 0:
        raise ValueError(f"margin {margin}: expected a number above 0")
    if len(values) < 2:
        return None
    if np.ptp(values) == 0:
        return 0.0 if abs(values[0]) < margin else 1.0
    nearer = margin - abs(float(np.mean(values)))
    return t_below(-nearer / _standard_error(np.asarray(values, dtype=float)), len(values) - 1)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return Holm's adjusted p-values in the same order; ``None``, a planned test without a p yet, counts as 1 and stays.

    The k-th smallest of m p-values is multiplied by m − k + 1. No result is below an earlier one, or above 1.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    least = 0.0
    for rank, (p, index) in enumerate(order):
        least = min(1.0, max(least, p * (len(p_values) - rank)))
        adjusted[index] = least
    return adjusted


def _all_signs(by_seed: NDArray, seed: int) -> float | None:
    if len(by_seed) < 2:
        return None
    count = len(by_seed)
    if 2**count <= DRAWS:  # up to 13 seeds: all choices
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=count)))
        chosen = 0
    else:  # random choices, and the observed one
        signs = np.random.default_rng(seed).choice((-1.0, 1.0), (DRAWS, count))
        chosen = 1
    sums = signs @ by_seed
    least = abs(by_seed.sum()) * (1 - 1e-9)  # sums of other orders round differently
    return float((np.sum(np.abs(sums) >= least) + chosen) / (len(sums) + chosen))


def _standard_error(values: NDArray) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def t_below(t: float, degrees: int) -> float:
    """Return P(T ≤ t) of Student's t with a whole number of degrees of freedom.

    The series is that of Abramowitz and Stegun, *Handbook of Mathematical Functions*, 26.7.3 and 26.7.4. The absolute error is
    below 1e-15.
    """
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for step in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (step + 1) / (step + 2)
    central = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return min(1.0, max(0.0, (1 + central) / 2))


def t_quantile(probability: float, degrees: int) -> float:
    """Return the t with P(T ≤ t) = `probability` above 1/2, by bisection."""
    low, high = 0.0, 1.0
    while t_below(high, degrees) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_below(middle, degrees) < probability else (low, middle)
    return (low + high) / 2
