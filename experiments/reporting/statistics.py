"""Is one row better than another? Differences paired by seed and sentence, and what they are worth.

Two rows are compared where they have the same seed (the same data order and, where shapes allow, the same start) and the
same sentence. Three questions have answers of their own:

- **bootstrap**: other seeds *and* other sentences. Seeds are drawn with replacement, then sentences; the sentences are the
  same ones under every seed, so one draw of them serves all seeds of a draw (drawing anew for each seed would average away
  what makes a sentence easy for one row under every seed, and the interval would be too short).
- **all signs**: if the two rows were one, each seed's difference could as well have had the other sign. The p-value is
  the share of all 2^seeds choices of signs whose mean is as far from 0. It cannot be below 2 / 2^seeds.
- **t**: Student's test of the seeds' means, on this test set.

With 3 to 5 seeds the bootstrap of seeds is too sure of itself (three seeds of one sign never give an interval with 0 in
it), so read it beside t. For several named contrasts p-values are raised by Holm's rule.

BLEU is no mean over sentences: for it take sacrebleu's own tests, ``sacrebleu REFERENCES -i A B --paired-bs``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

DRAWS = 10_000
CONFIDENCE = 0.95

Scores = Mapping[int, ArrayLike]
"""By seed: a row's score, or its scores a sentence, in one order for all rows and seeds."""


@dataclass(frozen=True)
class Comparison:
    """What a contrast is worth. Values that need two seeds are ``None`` where there is one, the bootstrap's where there is but
    one number.

    Args:
        mean: mean difference over seeds and sentences.
        low, high: the bootstrap's 95 % interval.
        bootstrap_p: twice the smaller share of draws on one side of 0.
        seeds, sentences: how many.
        seed_means: the mean difference of each seed.
        positive: in how many seeds it is above 0.
        signs_p: two-sided, over all choices of signs.
        t, t_p: Student's t of the seeds' means and its two-sided p.
    """

    mean: float
    low: float | None
    high: float | None
    bootstrap_p: float | None
    seeds: int
    sentences: int
    seed_means: tuple[float, ...]
    positive: int
    signs_p: float | None
    t: float | None
    t_p: float | None


def differences(first: Scores, second: Scores) -> tuple[list[int], NDArray]:
    """first − second by the seeds that both have: these, and ``[seeds, sentences]``.

    Raises:
        ValueError: no common seed, or another number of sentences under some seed.
    """
    seeds = sorted(set(first) & set(second))
    if not seeds:
        raise ValueError(f"no common seed: {sorted(first)} and {sorted(second)}")
    rows = [[np.atleast_1d(np.asarray(scores[seed], dtype=float)) for scores in (first, second)] for seed in seeds]
    shapes = sorted({score.shape for pair in rows for score in pair})
    if len(shapes) > 1:
        raise ValueError(f"scores of different sentences cannot be paired: their shapes are {shapes}")
    if len(shapes[0]) != 1:
        raise ValueError(f"scores of shape {shapes[0]}: expected one a sentence")
    matrix = np.stack([one - other for one, other in rows])
    if not np.isfinite(matrix).all():
        raise ValueError("a score is infinite or not a number")
    return seeds, matrix


def bootstrap(matrix: NDArray, *, draws: int = DRAWS, seed: int = 0) -> NDArray:
    """Means of ``draws`` two-level draws from ``[seeds, sentences]``: rows with replacement, then columns."""
    generator = np.random.default_rng(seed)
    seeds, sentences = matrix.shape
    means = np.empty(draws)
    for start in range(0, draws, chunk := 500):
        count = min(chunk, draws - start)
        # how often each seed and each sentence is drawn
        rows = generator.multinomial(seeds, np.full(seeds, 1 / seeds), size=count)
        columns = generator.multinomial(sentences, np.full(sentences, 1 / sentences), size=count)
        means[start : start + count] = ((rows @ matrix) * columns).sum(1) / (seeds * sentences)
    return means


def summary(means: NDArray) -> tuple[float, float, float]:
    """The 95 % interval of drawn means, and twice the smaller share of them on one side of 0."""
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    # one is added so that no finite number of draws makes a p of 0
    smaller = (min((means <= 0).sum(), (means >= 0).sum()) + 1) / (len(means) + 1)
    return float(low), float(high), float(min(1.0, 2 * smaller))


def compare_matrix(matrix: NDArray, *, draws: int = DRAWS, seed: int = 0) -> Comparison:
    """Everything that is said of paired differences ``[seeds, sentences]``.

    Raises:
        ValueError: there are none.
    """
    if not matrix.size:
        raise ValueError("no scores: a comparison needs one at least")
    low, high, bootstrap_p = (None, None, None)
    if matrix.size > 1:
        low, high, bootstrap_p = summary(bootstrap(matrix, draws=draws, seed=seed))
    by_seed = matrix.mean(1)
    t, t_p = _student(by_seed)
    return Comparison(
        mean=float(matrix.mean()),
        low=low,
        high=high,
        bootstrap_p=bootstrap_p,
        seeds=matrix.shape[0],
        sentences=matrix.shape[1],
        seed_means=tuple(map(float, by_seed)),
        positive=int((by_seed > 0).sum()),
        signs_p=_all_signs(by_seed, seed),
        t=t,
        t_p=t_p,
    )


def compare(first: Scores, second: Scores, *, draws: int = DRAWS, seed: int = 0) -> Comparison:
    """first − second, paired by seed and sentence.

    Raises:
        ValueError: see :func:`differences`.
    """
    return compare_matrix(differences(first, second)[1], draws=draws, seed=seed)


def compare_interaction(
    first: tuple[Scores, Scores], second: tuple[Scores, Scores], *, draws: int = DRAWS, seed: int = 0
) -> Comparison:
    """(a − b) − (c − d), paired by seed and sentence: does what tells a from b depend on what tells (a, b) from (c, d)?

    Raises:
        ValueError: see :func:`differences`.
    """
    inner = [dict(zip(*differences(*pair), strict=True)) for pair in (first, second)]
    return compare(*inner, draws=draws, seed=seed)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values, in the order given; ``None``, a test that was named and cannot be made (yet), counts as 1 and stays.

    The k-th smallest of m is multiplied by m − k + 1; none may be below one before it, nor above 1.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    least = 0.0
    for rank, (p, index) in enumerate(order):
        least = min(1.0, max(least, p * (len(p_values) - rank)))
        adjusted[index] = least
    return adjusted


def _student(by_seed: NDArray) -> tuple[float | None, float | None]:
    if len(by_seed) < 2:
        return None, None
    if np.ptp(by_seed) == 0:  # no spread: certain, or no difference at all
        return (0.0, 1.0) if by_seed[0] == 0 else (math.copysign(math.inf, by_seed[0]), 0.0)
    result = stats.ttest_1samp(by_seed, 0.0)
    return float(result.statistic), float(result.pvalue)


def _all_signs(by_seed: NDArray, seed: int) -> float | None:
    if len(by_seed) < 2:
        return None
    # exact up to 13 seeds; above, as many choices as the bootstrap has draws
    result = stats.permutation_test(
        (by_seed,), np.mean, permutation_type="samples", n_resamples=DRAWS, rng=np.random.default_rng(seed)
    )
    return float(result.pvalue)
