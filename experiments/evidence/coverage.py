"""Simulate how often the intervals of `compare` contain the true difference, for other seeds and other sentences.

    python -m experiments.evidence.coverage          seconds; prints the table of `python -m experiments tables method`

A difference of seed s and sentence i is a_s + b_i + e_si, and the truth is 0. The share of sentences is the variance that b gives to
the mean, over the variance that a gives. Half as much as from a comes from e.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairseq_lowrank.records import statistics

SEEDS, SENTENCES, SHARES = (2, 3, 5), (200,), (0.0, 0.2, 1.0, 5.0)
DRAWS = 2000
BATCH = 100


class Coverage(NamedTuple):
    """The shares of intervals that contain the truth."""

    over_seeds: float
    over_sentences: float
    over_both: float


@functools.cache
def quantile(degrees: int) -> float:
    """Return the quantile of Student's t for 95 % intervals."""
    return statistics.t_quantile(0.975, degrees)


def coverage(seeds: int, sentences: int, share: float, *, tails: bool, draws: int = DRAWS) -> Coverage:
    """Return the coverage of the three intervals.

    Args:
        share: see the module.
        tails: sentences have heavy tails, Student's t with three degrees of freedom, instead of a normal distribution.
        draws: simulated experiments.
    """
    generator = np.random.default_rng([seeds, sentences, round(10 * share), tails])

    def of_sentences(size: tuple[int, ...]) -> NDArray:
        return generator.standard_t(3, size) / math.sqrt(3) if tails else generator.normal(size=size)

    hits = np.zeros(3)
    for _ in range(draws // BATCH):
        matrix = generator.normal(size=(BATCH, seeds, 1))
        matrix = matrix + of_sentences((BATCH, 1, sentences)) * math.sqrt(share * sentences / seeds)
        matrix = matrix + of_sentences((BATCH, seeds, sentences)) * math.sqrt(sentences / 2)
        mean = np.abs(matrix.mean((-1, -2)))
        over_seeds = matrix.mean(-1).std(-1, ddof=1) / math.sqrt(seeds)
        over_sentences = matrix.mean(-2).std(-1) / math.sqrt(sentences)
        both, degrees = statistics.seeds_and_sentences(matrix)
        hits += [
            (mean <= quantile(seeds - 1) * over_seeds).sum(),
            (mean <= 1.96 * over_sentences).sum(),  # the bootstrap's interval of many sentences
            (mean <= both * [quantile(statistics.whole_degrees(one)) for one in degrees]).sum(),
        ]
    return Coverage(*(hits / (draws // BATCH * BATCH)).tolist())


def rows() -> Iterator[str]:
    """Yield the lines of the table, in Markdown."""
    yield "| seeds | sentences | distribution | share of sentences | t over seeds | over sentences | mixed |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for seeds in SEEDS:
        for sentences in SENTENCES:
            for tails in (False, True):
                for share in SHARES:
                    found = coverage(seeds, sentences, share, tails=tails)
                    shown = " | ".join(f"{100 * one:.1f} %" for one in found)
                    name = "heavy tails" if tails else "normal"
                    yield f"| {seeds} | {sentences:,} | {name} | {share:g} | {shown} |"


if __name__ == "__main__":
    for line in rows():
        print(line, flush=True)
