"""The cost of cuts to several ranks on the same sequences, and the least rank whose cost is tolerable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from fairseq_lowrank.tools.measuring.subject import Metric, Values

RESAMPLES = 1000


def mean(values: Values, indices: Iterable[int] | None = None, part: int = 0) -> float:
    """Return the weighted mean of the metric, or with ``part`` 2 of the second metric, over some samples."""
    chosen = [values[index] for index in (values if indices is None else indices)]
    return sum(one[part] for one in chosen) / max(1e-300, sum(one[1] for one in chosen))


@dataclass
class Curve:
    """What cuts to several ranks cost.

    Args:
        size: the rank from which a cut changes nothing.
        metric: of the values.
        uncut: the values of the uncut model.
        compute: returns the values of a cut to a rank.
        nothing: values of models that know nothing. The least loss of one is what attention is worth.
        found: the values of each rank that was tried; of the size by default.
    """

    size: int
    metric: Metric
    uncut: Values
    compute: Callable[[int], Values]
    nothing: list[Values] = field(default_factory=list)
    found: dict[int, Values] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.found.setdefault(self.size, self.uncut)

    def attempt(self, ranks: Iterable[int]) -> None:
        """Compute the values at ranks that were not tried."""
        for rank in ranks:
            if rank not in self.found:
                self.found[rank] = self.compute(rank)

    def loss(self, values: Values, indices: Iterable[int] | None = None) -> float:
        """Return how much worse some values are than those of the uncut model."""
        chosen = list(self.uncut if indices is None else indices)
        return self.metric.loss(mean(values, chosen), mean(self.uncut, chosen))

    def worth(self, indices: Iterable[int] | None = None) -> float:
        """Return what attention saves against knowing nothing."""
        return min(self.loss(values, indices) for values in self.nothing)

    def cost(self, rank: int, indices: Iterable[int] | None = None) -> float:
        """Return the loss at a rank as a share of the worth; 0 if attention is worth nothing."""
        worth = self.worth(indices)
        return self.loss(self.found[rank], indices) / worth if worth > 0 else 0.0

    def need(self, tolerance: float) -> int:
        """Return the :func:`least_rank` of those that were tried."""
        return least_rank(self.cost, self.found, tolerance)

    def bisect(self, tolerance: float) -> int:
        """Try ranks until the need is certain, and return it."""
        while True:
            need = self.need(tolerance)
            tried = max((rank for rank in self.found if rank < need), default=need)
            if need - tried <= 1:
                return need
            self.attempt([(need + tried) // 2])

    def interval(self, tolerance: float, seed: int) -> list[int]:
        """Return the 95 % interval of the need when sequences are drawn again with replacement, rounded outwards to tried ranks."""
        indices, generator = list(self.uncut), torch.Generator().manual_seed(seed)
        needs = []
        for draw in torch.randint(len(indices), (RESAMPLES, len(indices)), generator=generator).tolist():
            chosen = [indices[position] for position in draw]
            needs.append(least_rank(lambda rank, chosen=chosen: self.cost(rank, chosen), self.found, tolerance))
        needs.sort()
        low, high = needs[math.floor(0.025 * (RESAMPLES - 1))], needs[math.ceil(0.975 * (RESAMPLES - 1))]
        return [lower_end(low, self.found), high]

    def entries(self) -> list[dict[str, float]]:
        """Return for each rank the value, and the cost in the unit, as a share of the model's loss and as one of the worth."""
        second = len(next(iter(self.uncut.values()))) > 2
        rows = []
        for rank, values in sorted(self.found.items()):
            added = self.loss(values)
            row = {"rank": rank, "value": mean(values), "added": added, "of_loss": added / self._own_loss()}
            row |= {"cost": self.cost(rank)} | ({"second_value": mean(values, part=2)} if second else {})
            rows.append(row)
        return rows

    def worths(self) -> dict[str, float]:
        """Return what attention is worth in the metric's unit and as a share of the model's loss."""
        return {"worth": self.worth(), "worth_share": self.worth() / self._own_loss()}

    def _own_loss(self) -> float:
        return max(1e-300, abs(mean(self.uncut)))


def least_rank(cost: Callable[[int], float], ranks: Iterable[int], tolerance: float) -> int:
    """Return the least rank that costs at most the tolerance, like all greater ranks that were tried."""
    ranks = sorted(ranks, reverse=True)
    need = ranks[0]
    for rank in ranks:
        if cost(rank) > tolerance:
            break
        need = rank
    return need


def lower_end(low: int, tried: Iterable[int]) -> int:
    """Return the least need that :func:`least_rank` rounds up to ``low``: the rank after the tried rank below it."""
    return 1 + max((rank for rank in tried if rank < low), default=-1)
