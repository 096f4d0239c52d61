"""Measure a subject: the directions that its heads use, and what a cut to each rank costs on held-out sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from tqdm import tqdm

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.tools.measuring.directions import energies
from fairseq_lowrank.tools.measuring.probe import KINDS, Probe, statistics
from fairseq_lowrank.tools.measuring.subject import Layer, Subject
from fairseq_lowrank.tools.measuring.verdict import verdicts

TOLERANCE = 0.01
RESAMPLES = 1000
SEQUENCES_OF_LAYERS = 8
"""Held-out sequences on which single layers are cut."""


def ranks_below(size: int, *, few: bool = False) -> list[int]:
    """Return the ranks that are tried below a size: powers of two, size − 1, and unless ``few`` three times powers of two from 12."""
    steps = {size - 1, *(2**power for power in range(16))}
    if not few:
        steps |= {3 * 2**power for power in range(2, 15)}
    return sorted(step for step in steps if 0 < step < size)


@torch.no_grad()
def measure(
    subject: Subject, label: str, *, tolerance: float = TOLERANCE, seed: int = 1, layers: bool = True
) -> dict[str, object]:
    """Measure a model, and return numbers, needs and verdicts as a dictionary for JSON.

    The first half of the samples gives the bases, the second half is held out for the cuts.

    Args:
        label: the model's name in tables and figures.
        tolerance: the share of the loss that a cut may cost.
        seed: for the intervals over sequences.
        layers: also cut single layers, on the first :data:`SEQUENCES_OF_LAYERS` held-out sequences.

    Raises:
        UserError: there are fewer than two sequences, or a layer's scores are not products of queries and keys.
    """
    if len(subject.samples) < 2:
        raise UserError("one sequence is too few: one half gives the bases, and the other half is held out. Give more.")
    if not 0 < tolerance < 1:
        raise UserError(f"--tolerance {tolerance}: expected a share of the loss. Give a number between 0 and 1.")
    half = len(subject.samples) // 2
    basis, held_out = list(range(half)), list(range(half, len(subject.samples)))
    probe = Probe([layer.limit for layer in subject.layers])
    with subject.hooked(probe), tqdm(desc=label, unit=" passes", disable=None) as progress:
        trial = _Trial(subject, probe, tolerance, seed, progress)
        subject.prepare(held_out)
        probe.gathering = True
        for index in basis:
            subject.evaluate(index)
            progress.update()
        probe.gathering = False
        if not probe.layers:
            raise UserError(
                f"{subject.name}: no attention layer ran on these sequences. Use other sequences, or another model."
            )
        uncut = trial.values({}, held_out)
        cuts: dict[str, dict] = {}
        for kind in KINDS:
            probe.kind = kind
            probe.cuts = {i: found.cut(kind, subject.layers[i].output_weight) for i, found in probe.layers.items()}
            cuts[kind] = {"all": trial.curve(probe.layers, held_out, uncut)}
            sites = dict.fromkeys(subject.layers[index].site for index in probe.layers)
            if kind == "scores":
                chosen = {site: [i for i in probe.layers if subject.layers[i].site == site] for site in sites}
                whole = {next(iter(sites)): cuts[kind]["all"]} if len(sites) == 1 else {}
                cuts[kind]["sites"] = whole or {
                    site: trial.curve(found, held_out, uncut) for site, found in chosen.items()
                }
                if layers:
                    few = held_out[:SEQUENCES_OF_LAYERS]
                    at_layers = trial.values({}, few)
                    cuts[kind]["layers"] = [
                        {"site": subject.layers[i].site, "layer": subject.layers[i].layer}
                        | trial.curve([i], few, at_layers, refine=False)
                        for i in probe.layers
                    ]
    result = {
        "label": label,
        "model": subject.name,
        "metric": subject.metric.name,
        "less_is_better": subject.metric.less_is_better,
        "tolerance": tolerance,
        "sequences_of_basis": len(basis),
        "tokens_of_basis": min(found.keys.count for found in probe.layers.values()),
        "sequences_held_out": len(held_out),
        "mean_length": subject.sequence_length,
        "value": _mean(uncut),
        "layers": [_describe(subject.layers[i], found, probe) for i, found in probe.layers.items()],
        "never_ran": [layer.name for i, layer in enumerate(subject.layers) if i not in probe.layers],
        "cuts": cuts,
    }
    return result | {"verdicts": verdicts(result)}


Values = dict[int, tuple[float, float]]
"""The metric's sum and weight for each sample."""


def _mean(values: Values, indices: Iterable[int] | None = None) -> float:
    chosen = [values[index] for index in (values if indices is None else indices)]
    return sum(total for total, _ in chosen) / max(1e-300, sum(weight for _, weight in chosen))


class _Trial:
    """Cuts of one model, all compared with the uncut model on the same sequences."""

    def __init__(self, subject: Subject, probe: Probe, tolerance: float, seed: int, progress: tqdm) -> None:
        self.subject, self.probe, self.tolerance, self.seed, self.progress = subject, probe, tolerance, seed, progress

    def values(self, ranks: dict[int, int], indices: list[int]) -> Values:
        """Return the metric of every sample with the layers in ``ranks`` cut."""
        self.probe.ranks = ranks
        found = {}
        for index in indices:
            found[index] = self.subject.evaluate(index)
            self.progress.update()
        self.probe.ranks = {}
        return found

    def curve(self, layers: Iterable[int], indices: list[int], uncut: Values, *, refine: bool = True) -> dict:
        """Return value and cost at each rank, and the least rank within the tolerance.

        Args:
            refine: bisect between the ranks of the grid, and add the divergence of patterns and an interval over sequences.
        """
        layers = list(layers)
        size = max(self.probe.size(self.probe.kind, index) for index in layers)
        found: dict[int, Values] = {size: uncut}
        divergences: dict[int, float] = {}

        def compute(rank: int) -> None:
            measured = refine and self.probe.kind == "scores"
            self.probe.divergences = [] if measured else None
            found[rank] = self.values(dict.fromkeys(layers, rank), indices)
            if measured:
                divergences[rank] = float(torch.stack(self.probe.divergences).mean())
            self.probe.divergences = None

        def cost(rank: int, chosen: list[int] = indices) -> float:
            return self.subject.metric.cost(_mean(found[rank], chosen), _mean(uncut, chosen))

        for rank in ranks_below(size, few=not refine or self.probe.kind == "values"):
            compute(rank)
        while refine:
            need = least_rank(cost, found, self.tolerance)
            below = max((rank for rank in found if rank < need), default=0)
            if need - below <= 1:
                break
            compute((need + below) // 2)
        curve = {
            "size": size,
            "need": least_rank(cost, found, self.tolerance),
            "ranks": [
                {"rank": rank, "value": _mean(found[rank]), "cost": cost(rank)}
                | ({"divergence_bits": divergences[rank]} if rank in divergences else {})
                for rank in sorted(found)
            ],
        }
        if refine:
            curve["interval"] = self._interval(cost, found, indices)
        return curve

    def _interval(self, cost: Callable[..., float], found: dict[int, Values], indices: list[int]) -> list[int]:
        """Return the 95 % interval of the need when sequences are drawn again with replacement."""
        generator = torch.Generator().manual_seed(self.seed)
        draws = torch.randint(len(indices), (RESAMPLES, len(indices)), generator=generator).tolist()
        needs = []
        for draw in draws:
            chosen = [indices[position] for position in draw]
            needs.append(least_rank(lambda rank, chosen=chosen: cost(rank, chosen), found, self.tolerance))
        needs.sort()
        return [needs[math.floor(0.025 * (RESAMPLES - 1))], needs[math.ceil(0.975 * (RESAMPLES - 1))]]


def least_rank(cost: Callable[[int], float], ranks: Iterable[int], tolerance: float) -> int:
    """Return the least rank that costs at most the tolerance, like all greater ranks that were tried."""
    ranks = sorted(ranks, reverse=True)
    need = ranks[0]
    for rank in ranks:
        if cost(rank) > tolerance:
            break
        need = rank
    return need


def _describe(layer: Layer, found, probe: Probe) -> dict[str, object]:
    """Return a layer's statistics: means over sequences, of one basis for all sequences, and of the weights alone."""
    kept = {"name": layer.name, "site": layer.site, "layer": layer.layer, "heads": layer.heads}
    kept |= {"head_size": layer.head_size, "limit": layer.limit}
    weights = None
    if layer.query_weight is not None and layer.key_weight is not None:
        weights = energies(*(weight.double().mT @ weight.double() for weight in (layer.key_weight, layer.query_weight)))
    values = found.cut("values", layer.output_weight).energies
    return kept | {
        "one_sequence": {name: _list(torch.stack(each).mean(0)) for name, each in found.sequences.items()},
        "one_basis": _lists(statistics(found.cut("scores", None).energies, layer.limit)),
        "weights": None if weights is None else _lists(statistics(weights, layer.limit)),
        "values": {"size": values.size(-1)} | _lists(statistics(values, values.size(-1))),
    }


def _lists(tensors: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: _list(tensor) for name, tensor in tensors.items()}


def _list(tensor: Tensor) -> list[float]:
    return [round(float(value), 6) for value in tensor]
