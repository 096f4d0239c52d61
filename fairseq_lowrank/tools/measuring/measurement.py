"""Measure a subject: the directions that its heads use, and what a cut to each rank costs on held-out sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fairseq_lowrank.files import say
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.progress import Progress
from fairseq_lowrank.tools.measuring.directions import energies
from fairseq_lowrank.tools.measuring.probe import Kind, Probe, statistics
from fairseq_lowrank.tools.measuring.subject import Layer, Subject
from fairseq_lowrank.tools.measuring.verdict import LIMIT, TOLERANCE, bounds, verdicts

STEPS = (1, 5, 25)
"""Needs are also found at these multiples of the tolerance, which show how steep the curve is."""
RESAMPLES = 1000
SEQUENCES_OF_LAYERS = 8
"""Held-out sequences on which single layers are cut."""


def ranks_below(size: int, *, few: bool = False) -> list[int]:
    """Return the ranks that are tried below a size, without 0.

    These are powers of two, size − 1, and unless ``few`` three times powers of two from 12, and the ranks at which verdicts change.
    """
    steps = {size - 1, *(2**power for power in range(16))}
    if not few:
        steps |= {3 * 2**power for power in range(2, 15)} | set(bounds(size))
    return sorted(step for step in steps if 0 < step < size)


@torch.no_grad()
def measure(
    subject: Subject,
    label: str,
    *,
    tolerance: float = TOLERANCE,
    seed: int = 1,
    layers: bool = True,
    quick: bool = False,
) -> dict[str, object]:
    """Measure a model, and return numbers, needs and verdicts as a dictionary for JSON.

    The first half of the samples gives the bases, the second half is held out for the cuts.

    Args:
        label: the model's name in tables and figures.
        tolerance: the share of what attention is worth that a cut may cost.
        seed: for the intervals over sequences.
        layers: also cut single layers, on the first :data:`SEQUENCES_OF_LAYERS` held-out sequences.
        quick: only find the needs of scores, without a grid of ranks, single layers and values.

    Raises:
        UserError: there are fewer than two sequences, or a layer's scores are not products of queries and keys.
    """
    if len(subject.samples) < 2:
        raise UserError("one sequence is too few: one half gives the bases, and the other half is held out. Give more.")
    if not 0 < tolerance < 1:
        raise UserError(f"--tolerance {tolerance}: expected a share. Give a number between 0 and 1.")
    half = len(subject.samples) // 2
    basis, held_out = list(range(half)), list(range(half, len(subject.samples)))
    few = held_out[:SEQUENCES_OF_LAYERS]
    layers = layers and not quick
    probe = Probe([layer.limit for layer in subject.layers])
    passes = len(basis) + len(held_out) * (2 if subject.compares else 1)
    passes += len(held_out) * _cuts_of(subject.layers, quick) + len(few) * _cuts_of_layers(subject.layers, layers)
    say(f"{label}: about {passes:,} passes of one sequence each")
    progress = Progress(label, passes, "passes", rough=True)
    trial = _Trial(subject, probe, tolerance, seed, quick, progress)
    with progress, subject.hooked(probe):
        subject.prepare(held_out)
        for _ in held_out if subject.compares else ():
            progress.update()
        probe.gathering = True
        for index in basis:
            subject.evaluate(index)
            progress.update()
        probe.gathering = False
        if not probe.layers:
            raise UserError(
                f"{subject.name}: no attention layer ran on these sequences. Use other sequences, or another model."
            )
        trial.uncut = trial.values({}, held_out)
        trial.cut("scores")
        scores, found = trial.curve(probe.layers, held_out)
        by_site: dict[str, list[int]] = {}
        for index in probe.layers:
            by_site.setdefault(subject.layers[index].site, []).append(index)
        sites = {
            site: scores if len(by_site) == 1 else trial.curve(chosen, held_out)[0] for site, chosen in by_site.items()
        }
        cuts: dict[str, dict] = {"scores": {"all": scores, "sites": sites}}
        if layers:
            cuts["scores"]["layers"] = [
                {"site": subject.layers[i].site, "layer": subject.layers[i].layer}
                | trial.curve([i], few, refine=False, worth=found[0])[0]
                for i in probe.layers
            ]
        trial.cut("own")
        known = {rank: found[rank] for rank in (0, scores["need"], scores["size"])}
        cuts["own"] = {"all": trial.curve(probe.layers, held_out, known=known, below=scores["need"])[0]}
        if not quick:
            trial.cut("values")
            cuts["values"] = {"all": trial.curve(probe.layers, held_out)[0]}
    runs = {index: max(1, found.calls // len(basis)) for index, found in probe.layers.items()}
    result = {
        "label": label,
        "model": subject.name,
        "about": subject.about,
        "metric": subject.metric.name,
        "less_is_better": subject.metric.less_is_better,
        "tolerance": tolerance,
        "sequences_of_basis": len(basis),
        "tokens_of_basis": min(found.keys.count // runs[index] for index, found in probe.layers.items()),
        "sequences_held_out": len(held_out),
        "mean_length": subject.sequence_length,
        "value": _mean(trial.uncut),
        "layers": [_describe(subject.layers[i], found, probe) | {"runs": runs[i]} for i, found in probe.layers.items()],
        "never_ran": [layer.name for i, layer in enumerate(subject.layers) if i not in probe.layers],
        "cuts": cuts,
    }
    if subject.second is not None:
        result |= {"second_metric": subject.second.name, "second_value": _mean(trial.uncut, part=2)}
    return result | {"limit": LIMIT, "verdicts": verdicts(result)}


def _cuts_of(layers: list[Layer], quick: bool) -> int:
    """Return about how many ranks are tried on all held-out sequences: of all heads, of several sites, of own bases and of values."""
    size = max(layer.limit for layer in layers)
    bisected = math.ceil(math.log2(max(2, size)))
    if quick:
        each = 3 + len(STEPS) * max(0, bisected - 2)
        return each * (1 + _curves_of_sites(layers)) + bisected
    each, values = _cuts_of_curve(size), _cuts_of_curve(max(layer.head_size for layer in layers), few=True)
    return each * (1 + _curves_of_sites(layers)) + bisected + values


def _cuts_of_curve(size: int, *, few: bool = False) -> int:
    """Return about how many ranks are tried for one curve: 0, the grid, and the bisections at each tolerance."""
    grid = len({*ranks_below(size, few=few), *bounds(size)} - {0})
    return 1 + grid + len(STEPS) * round(math.log2(size / (1 + grid)))


def _curves_of_sites(layers: list[Layer]) -> int:
    sites = {layer.site for layer in layers}
    return len(sites) if len(sites) > 1 else 0


def _cuts_of_layers(layers: list[Layer], wanted: bool) -> int:
    return sum(1 + len(ranks_below(layer.limit, few=True)) for layer in layers) if wanted else 0


Values = dict[int, tuple[float, ...]]
"""The metric's sum and weight for each sample, and the sum of a second metric."""


def _mean(values: Values, indices: Iterable[int] | None = None, part: int = 0) -> float:
    chosen = [values[index] for index in (values if indices is None else indices)]
    return sum(one[part] for one in chosen) / max(1e-300, sum(one[1] for one in chosen))


class _Trial:
    """Cuts of one model, all compared with the uncut model on the same sequences."""

    def __init__(
        self, subject: Subject, probe: Probe, tolerance: float, seed: int, quick: bool, progress: Progress
    ) -> None:
        self.subject, self.probe, self.tolerance, self.seed, self.quick = subject, probe, tolerance, seed, quick
        self.progress = progress
        self.uncut: Values = {}

    def cut(self, kind: Kind) -> None:
        """Choose what is cut from now on."""
        self.probe.kind = kind
        weights = [layer.output_weight for layer in self.subject.layers]
        self.probe.cuts = {i: found.cut(kind, weights[i]) for i, found in self.probe.layers.items()}

    def values(self, ranks: dict[int, int], indices: list[int]) -> Values:
        """Return the metric of every sample with the layers in ``ranks`` cut."""
        self.probe.ranks = ranks
        found = {}
        for index in indices:
            found[index] = self.subject.evaluate(index)
            self.progress.update()
        self.probe.ranks = {}
        return found

    def curve(
        self,
        layers: Iterable[int],
        indices: list[int],
        *,
        refine: bool = True,
        known: dict[int, Values] | None = None,
        below: int | None = None,
        worth: Values | None = None,
    ) -> tuple[dict, dict[int, Values]]:
        """Return a curve, and the values of each rank.

        A curve has the size, value and cost at each rank, what attention is worth, the needs, and their interval over sequences.

        Args:
            refine: bisect between the ranks of the grid for the need at each tolerance, and add the divergence of patterns and
                the interval.
            known: values of ranks that need not be computed.
            below: compute and return only ranks below this one, and the size; find the need at the tolerance of the verdict
                alone.
            worth: values at rank 0 that say what attention is worth, by default those of these layers.
        """
        layers = list(layers)
        kind, metric = self.probe.kind, self.subject.metric
        size = max(self.probe.size(kind, index) for index in layers)
        found: dict[int, Values] = dict(known or {size: self.uncut})
        divergences: dict[int, float] = {}

        def compute(rank: int) -> None:
            measured = refine and kind == "scores" and not self.quick
            self.probe.divergences = [] if measured else None
            found[rank] = self.values(dict.fromkeys(layers, rank), indices)
            if measured:
                divergences[rank] = float(torch.stack(self.probe.divergences).mean())
            self.probe.divergences = None

        def loss(values: Values, chosen: list[int]) -> float:
            return metric.loss(_mean(values, chosen), _mean(self.uncut, chosen))

        def cost(rank: int, chosen: list[int] = indices) -> float:
            whole = loss(found[0] if worth is None else worth, chosen)
            return loss(found[rank], chosen) / whole if whole > 0 else 0.0

        grid = set() if self.quick else set(ranks_below(size, few=not refine or kind != "scores"))
        if self.quick or (refine and below is None):  # else an end of the interval may be rounded past one
            grid |= set(bounds(size))
        for rank in [0, *sorted(grid)]:
            if rank not in found and (below is None or rank < below):
                compute(rank)
        steps = STEPS if below is None else STEPS[:1]
        shares = [share for step in steps if (share := self.tolerance * step) < 1]
        while refine:
            between = []
            for share in shares:
                need = least_rank(cost, found, share)
                tried = max((rank for rank in found if rank < need), default=need)
                if need - tried > 1:
                    between.append((need + tried) // 2)
            if not between:
                break
            compute(between[0])
        uncut = _mean(self.uncut, indices)
        curve = {
            "size": size,
            "need": least_rank(cost, found, self.tolerance),
            "needs": [[share, least_rank(cost, found, share)] for share in shares],
            "ranks": [
                {"rank": rank, "value": _mean(found[rank], indices), "cost": cost(rank)}
                | ({"divergence_bits": divergences[rank]} if rank in divergences else {})
                | ({"second_value": _mean(found[rank], indices, part=2)} if self.subject.second else {})
                for rank in sorted(found)
                if rank != below
            ],
        }
        if worth is None:
            curve |= {
                "worth": loss(found[0], indices),
                "worth_share": loss(found[0], indices) / max(1e-300, abs(uncut)),
            }
        if refine and below is None:
            curve["interval"] = self._interval(cost, found, indices)
        return curve, found

    def _interval(self, cost: Callable[..., float], found: dict[int, Values], indices: list[int]) -> list[int]:
        """Return the 95 % interval of the need when sequences are drawn again with replacement, rounded outwards to tried ranks."""
        generator = torch.Generator().manual_seed(self.seed)
        draws = torch.randint(len(indices), (RESAMPLES, len(indices)), generator=generator).tolist()
        needs = []
        for draw in draws:
            chosen = [indices[position] for position in draw]
            needs.append(least_rank(lambda rank, chosen=chosen: cost(rank, chosen), found, self.tolerance))
        needs.sort()
        low, high = needs[math.floor(0.025 * (RESAMPLES - 1))], needs[math.ceil(0.975 * (RESAMPLES - 1))]
        return [lower_end(low, found), high]


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
