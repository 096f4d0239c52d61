"""Tests of differences between two rows, paired by seed and sentence.

Two rows are compared on common seeds (the same order of data and, if shapes allow, the same initial parameters) and on the same
sentences. Each test answers a different question:

- **Student's t** (other seeds): interval and p of the seeds' mean differences, on this test set. With few seeds the interval is
  long, but its coverage is right. A bootstrap over three seeds covers the truth in only 75 % of cases.
- **bootstrap over sentences** (other test sentences): interval and p for these trainings. It needs values of each sentence. A
  score that is a mean over sentences needs one value; BLEU needs the counts that it is computed from.
- **mixed estimate** (other seeds and other sentences): an interval from the variances of seeds and of sentences, see
  :func:`seeds_and_sentences`. It needs three seeds. Neither of the two intervals above covers both.
- **all signs**: if the two rows were equal, each seed's difference could have the other sign. The p-value is the share of all
  2^seeds choices of signs whose mean is as far from 0. It cannot be below 2 / 2^seeds.

For several planned contrasts :func:`holm` corrects the p-values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairseq_lowrank.messages import UserError

DRAWS = 10_000
CONFIDENCE = 0.95
# With two seeds the mixed estimate covers the truth too rarely (docs/evidence/method.md).
LEAST_SEEDS_OF_BOTH = 3

Scores = Mapping[int, ArrayLike]
"""By seed: a row's score, or its scores of sentences, in the same order for all rows and seeds."""
Measure = Callable[[NDArray], NDArray]
"""The score of a corpus, from sums over its sentences of their counts ``[…, counts]``."""


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
        sentences_p: its two-sided p, the share of draws whose difference is as far from the mean as the mean is from 0.
        both_low, both_high: the 95 % interval of the mixed estimate over seeds and sentences, for three seeds or more.
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
    sentences_p: float | None
    both_low: float | None = None
    both_high: float | None = None


VERDICTS = tuple(name for name in Comparison.__dataclass_fields__ if name.endswith(("low", "high", "p", "t")))
"""The fields of a comparison that say which side is better."""


def paired_differences(first: Scores, second: Scores) -> tuple[list[int], NDArray]:
    """Return the common seeds, and first − second for them, ``[seeds, sentences]``.

    Raises:
        UserError: there is no common seed, or the numbers of sentences differ.
    """
    seeds = sorted(set(first) & set(second))
    if not seeds:
        raise UserError(f"no common seed: {sorted(first)} and {sorted(second)}. Train both rows with the same seeds.")
    rows = [[np.atleast_1d(np.asarray(scores[seed], dtype=float)) for scores in (first, second)] for seed in seeds]
    shapes = sorted({score.shape for pair in rows for score in pair})
    if len(shapes) > 1:
        raise UserError(f"the rows have scores of shapes {shapes}. Score all of them on the same sentences.")
    if len(shapes[0]) != 1:
        raise UserError(f"scores of shape {shapes[0]}: expected one per sentence")
    matrix = np.stack([one - other for one, other in rows])
    if not np.isfinite(matrix).all():
        raise UserError("a score is infinite or not a number. Remove its run.")
    return seeds, matrix


def bleu(sums: NDArray) -> NDArray:
    """Return BLEU from sums of sentences' counts ``[…, 2 + 2 · orders]``, as sacrebleu does with its smoothing ``exp``.

    The counts are the lengths of hypothesis and reference, matching n-grams of each order, and all n-grams of each order.
    """
    orders = (sums.shape[-1] - 2) // 2
    hypothesis, reference = sums[..., 0], sums[..., 1]
    correct, total = sums[..., 2 : 2 + orders], sums[..., 2 + orders :]
    with np.errstate(divide="ignore", invalid="ignore"):
        # each order without a match halves the precision once more
        halvings = 2.0 ** np.cumsum(correct == 0, -1)
        precisions = np.where(correct == 0, 1 / halvings, correct) / total
        penalty = np.exp(np.minimum(0.0, 1 - reference / hypothesis))
        scores = 100 * penalty * np.exp(np.log(precisions).mean(-1))
    defined = (correct > 0).any(-1) & (total > 0).all(-1)
    return np.where(defined, scores, 0.0)


def sentence_bootstrap(
    values: NDArray, measure: Measure, *, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float, float]:
    """Return the bootstrap's 95 % interval over sentences of a difference, and its p.

    Args:
        values: counts of sentences ``[sentences, counts]``.
        measure: returns the difference from sums of these counts.
    """
    count = len(values)
    generator = np.random.default_rng(seed)
    batch = max(1, min(500, 5_000_000 // count))  # all draws at once would need much memory
    found = np.empty(draws)
    for start in range(0, draws, batch):
        size = min(batch, draws - start)
        chosen = generator.integers(0, count, (size, count)) + count * np.arange(size)[:, None]
        weights = np.bincount(chosen.ravel(), minlength=size * count).reshape(size, count)
        found[start : start + size] = measure(weights @ values)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(found, (tail, 100 - tail))
    observed = float(measure(values.sum(0)))
    further = np.abs(found - observed) >= abs(observed) * (1 - 1e-9)
    return float(low), float(high), float((further.sum() + 1) / (draws + 1))


def seeds_and_sentences(matrix: NDArray) -> tuple[NDArray, NDArray]:
    """Return the standard error of the mean over other seeds and other sentences, and its degrees of freedom.

    The model is y = μ + a_seed + b_sentence + e, all random. The variance of the mean is (MS_a + MS_b − MS_e) / (seeds · sentences)
    with the mean squares MS of two-way analysis of variance without repetition. MS_b − MS_e counts as 0 if it is below. The degrees
    of freedom are Satterthwaite's.

    Args:
        matrix: differences ``[…, seeds, sentences]``.
    """
    seeds, sentences = matrix.shape[-2:]
    by_seed, by_sentence = matrix.mean(-1, keepdims=True), matrix.mean(-2, keepdims=True)
    rest = matrix - by_seed - by_sentence + matrix.mean((-1, -2), keepdims=True)
    of_seeds = sentences * by_seed.var((-1, -2), ddof=1)
    of_sentences = seeds * by_sentence.var((-1, -2), ddof=1)
    of_rest = (rest**2).sum((-1, -2)) / ((seeds - 1) * (sentences - 1))
    total = of_seeds + np.maximum(of_sentences - of_rest, 0)
    terms = of_seeds**2 / (seeds - 1)
    further = of_sentences**2 / (sentences - 1) + of_rest**2 / ((seeds - 1) * (sentences - 1))
    terms = terms + np.where(of_sentences > of_rest, further, 0)
    with np.errstate(invalid="ignore"):
        degrees = np.where(terms > 0, total**2 / terms, seeds - 1)
    return np.sqrt(total / (seeds * sentences)), degrees


def _over_both(mean: float, matrix: NDArray) -> tuple[float, float] | tuple[None, None]:
    """Return the interval of the mixed estimate; None twice for too few seeds or sentences."""
    if matrix.shape[0] < LEAST_SEEDS_OF_BOTH or matrix.shape[1] < 2:
        return None, None
    error, degrees = seeds_and_sentences(matrix)
    reach = t_quantile((1 + CONFIDENCE) / 2, whole_degrees(float(degrees))) * float(error)
    return mean - reach, mean + reach


def whole_degrees(degrees: float) -> int:
    """Return degrees of freedom rounded down, for a longer interval; above 100 it is 1 % longer at most."""
    return max(1, min(100, math.floor(degrees)))


def compare_matrix(matrix: NDArray, *, resolution: float = 0.0, draws: int = DRAWS, seed: int = 0) -> Comparison:
    """Compute all statistics of paired differences ``[seeds, sentences]``.

    Args:
        resolution: see :func:`student`.

    Raises:
        ValueError: there are no differences.
    """
    if not matrix.size:
        raise ValueError("no scores: expected at least one")
    count = matrix.shape[1]
    # a draw of sentences is used for all seeds, because a sentence that is easy for one seed is easy for every seed
    over_seeds = matrix.mean(0)[:, None]
    sentences = sentence_bootstrap(over_seeds, lambda sums: sums[..., 0] / count, draws=draws, seed=seed)
    return _comparison(matrix.mean(1), matrix, sentences if count > 1 else None, resolution, seed)


def compare(first: Scores, second: Scores, *, resolution: float = 0.0, draws: int = DRAWS, seed: int = 0) -> Comparison:
    """Compare first − second, paired by seed and sentence.

    Raises:
        UserError: see :func:`paired_differences`.
    """
    matrix = paired_differences(first, second)[1]
    return compare_matrix(matrix, resolution=resolution, draws=draws, seed=seed)


def compare_interaction(
    first: tuple[Scores, Scores], second: tuple[Scores, Scores], *, resolution: float = 0.0, draws: int = DRAWS
) -> Comparison:
    """Compare (a − b) − (c − d), paired by seed and sentence: does the lead of a over b differ from that of c over d?

    Raises:
        UserError: see :func:`paired_differences`.
    """
    inner = [dict(zip(*paired_differences(*pair), strict=True)) for pair in (first, second)]
    return compare(*inner, resolution=resolution, draws=draws)


def compare_counts(
    rows: Sequence[Scores], measure: Measure = bleu, *, resolution: float = 0.0, draws: int = DRAWS
) -> Comparison:
    """Compare A − B, or (A − B) − (C − D), of a score that is not a mean over sentences, such as BLEU.

    Args:
        rows: A and B, or A to D: by seed, counts of sentences ``[sentences, counts]``.
        measure: the score.
        resolution: see :func:`student`.

    Raises:
        UserError: there is no common seed, or the numbers of sentences differ.
    """
    signs = np.array((1.0, -1.0, -1.0, 1.0)[: len(rows)])
    seeds = sorted(set.intersection(*(set(row) for row in rows)))
    if not seeds:
        given = " and ".join(str(sorted(row)) for row in rows)
        raise UserError(f"no common seed: {given}. Train all rows with the same seeds.")
    counts = [[np.asarray(row[one], dtype=float) for one in seeds] for row in rows]
    shapes = sorted({array.shape for arrays in counts for array in arrays})
    if len(shapes) > 1:
        raise UserError(f"the rows have scores of shapes {shapes}. Score all of them on the same sentences.")
    stacked = np.array(counts)  # [rows, seeds, sentences, counts]
    _, _, sentences, width = stacked.shape
    by_seed = signs @ measure(stacked.sum(2))

    def difference(sums: NDArray) -> NDArray:
        scores = measure(sums.reshape(*sums.shape[:-1], len(rows), len(seeds), width))
        return (scores * signs[:, None]).sum(-2).mean(-1)

    flat = stacked.transpose(2, 0, 1, 3).reshape(sentences, -1)
    found = sentence_bootstrap(flat, difference, draws=draws) if sentences > 1 else None
    # the jackknife's values of single sentences, whose mean is the score up to its bias
    without = measure(stacked.sum(2, keepdims=True) - stacked)
    whole = measure(stacked.sum(2))[..., None]
    matrix = np.einsum("r,rsn->sn", signs, sentences * whole - (sentences - 1) * without)
    return _comparison(by_seed, matrix, found, resolution, seed=0)


def _comparison(
    by_seed: NDArray, matrix: NDArray, over_sentences: tuple[float, float, float] | None, resolution: float, seed: int
) -> Comparison:
    low, high, t, t_p = student(by_seed, resolution)
    sentences_low, sentences_high, sentences_p = over_sentences or (None, None, None)
    both_low, both_high = _over_both(float(by_seed.mean()), matrix)
    return Comparison(
        mean=float(by_seed.mean()),
        low=low,
        high=high,
        t=t,
        t_p=t_p,
        seeds=len(by_seed),
        sentences=matrix.shape[1],
        seed_means=tuple(map(float, by_seed)),
        positive=int((by_seed > 0).sum()),
        signs_p=_all_signs(by_seed, seed),
        sentences_low=sentences_low,
        sentences_high=sentences_high,
        sentences_p=sentences_p,
        both_low=both_low,
        both_high=both_high,
    )


def equal_after_rounding(values: ArrayLike, resolution: float) -> bool:
    """Return True if values differ by less than half of their resolution."""
    spread = float(np.ptp(np.asarray(values, dtype=float)))
    return spread == 0 or spread < resolution / 2


def student(
    values: ArrayLike, resolution: float = 0.0
) -> tuple[float, float, float, float] | tuple[None, None, None, None]:
    """Return the 95 % interval of the mean, t and its two-sided p; ``None`` four times for fewer than two values.

    Args:
        resolution: the last decimal place of the values. If all values are equal after rounding, their spread is unknown, and the
            standard error is the resolution. With 0, the values are exact.
    """
    values = np.asarray(values, dtype=float)
    if len(values) < 2:
        return None, None, None, None
    mean, error = float(values.mean()), standard_error(values, resolution)
    if error == 0:  # all values are equal and exact
        return (mean, mean, math.copysign(math.inf, mean), 0.0) if mean else (0.0, 0.0, 0.0, 1.0)
    reach, t = t_quantile((1 + CONFIDENCE) / 2, len(values) - 1) * error, mean / error
    return mean - reach, mean + reach, t, 2 * t_below(-abs(t), len(values) - 1)


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


def standard_error(values: NDArray, resolution: float = 0.0) -> float:
    """Return the standard error of the mean; the resolution if values are equal after rounding."""
    if equal_after_rounding(values, resolution):
        return resolution
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
