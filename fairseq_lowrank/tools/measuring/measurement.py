"""Measure a subject: the directions that its heads use, and what a cut to each rank costs on held-out sequences."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fairseq_lowrank.files import say
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.progress import Progress
from fairseq_lowrank.tools.measuring.curve import Curve, mean
from fairseq_lowrank.tools.measuring.directions import energies
from fairseq_lowrank.tools.measuring.probe import Kind, LayerStatistics, Probe, statistics
from fairseq_lowrank.tools.measuring.subject import Layer, Subject, Values
from fairseq_lowrank.tools.measuring.verdict import TOLERANCE, bounds, verdicts

STEPS = (1, 5, 25)
"""Needs are also found at these multiples of the tolerance, which show how steep the curve is."""
SEQUENCES_OF_LAYERS = 8
"""Held-out sequences on which single layers and single heads are cut."""
IDLE = 1e-4
"""A head whose cut to rank 0 costs less than this share of what attention is worth does nothing alone, so it has no need."""


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
    heads: bool = False,
) -> dict[str, object]:
    """Measure a model, and return numbers, needs and verdicts as a dictionary for JSON.

    The first half of the samples gives the bases, the second half is held out for the cuts.

    Args:
        label: the model's name in tables and figures.
        tolerance: the share of what attention is worth that a cut may cost.
        seed: for the intervals over sequences.
        layers: also cut single layers, on the first :data:`SEQUENCES_OF_LAYERS` held-out sequences.
        quick: only find the needs of scores, without a grid of ranks, single layers and values.
        heads: also cut single heads, on the same sequences as single layers.

    Raises:
        UserError: there are fewer than two sequences, or a layer's scores are not products of queries and keys.
    """
    if len(subject.samples) < 2:
        raise UserError("one sequence is too few: one half gives the bases, and the other half is held out. Give more.")
    if not 0 < tolerance < 1:
        raise UserError(f"--tolerance {tolerance}: expected a share. Give a number between 0 and 1.")
    trial = Trial(subject, tolerance, seed, quick)
    passes = trial.passes(layers=layers and not quick, heads=heads)
    say(f"{label}: about {passes:,} passes of one sequence each")
    trial.progress = Progress(label, passes, "passes", rough=True)
    with trial.progress, subject.hooked(trial.probe):
        trial.gather()
        whole, cuts = trial.scores()
        if layers and not quick:
            cuts["layers"] = [trial.layer(index, whole) for index in trial.probe.layers]
        if heads:
            cuts["heads"] = [one for index in trial.probe.layers for one in trial.heads(index, whole)]
        found: dict[str, dict] = {"scores": cuts, "own": {"all": trial.own(whole)}}
        if not quick:
            found["values"] = {"all": trial.values()}
    result = trial.result(label) | {"cuts": found}
    return result | {"verdicts": verdicts(result)}


class Trial:
    """Cuts of one model, all compared with the uncut model on the same sequences.

    Args:
        subject: the model and its sequences; see :func:`measure` for the others.
    """

    progress: Progress

    def __init__(self, subject: Subject, tolerance: float, seed: int, quick: bool) -> None:
        self.subject, self.tolerance, self.seed, self.quick = subject, tolerance, seed, quick
        self.probe = Probe([layer.limit for layer in subject.layers])
        half, count = len(subject.samples) // 2, len(subject.samples)
        self.basis, self.held_out = list(range(half)), list(range(half, count))
        self.few = self.held_out[:SEQUENCES_OF_LAYERS]
        self.uncut: Values = {}
        self.constant: Values | None = None

    def gather(self) -> None:
        """Run the uncut model: read the directions of the basis, and evaluate the held-out sequences.

        Raises:
            UserError: no attention layer ran.
        """
        if self.subject.compares:
            self.subject.prepare([*self.basis, *self.held_out])
            self.progress.update(len(self.subject.samples))
        self.probe.gathering = True
        self.evaluate({}, self.basis)
        self.probe.gathering = False
        if not self.probe.layers:
            raise UserError(
                f"{self.subject.name}: no attention layer ran on these sequences. Use other sequences, or another model."
            )
        self.uncut = self.evaluate({}, self.held_out)
        self.constant = self.subject.constant(self.basis, self.held_out)

    def evaluate(self, ranks: dict[int, int], indices: list[int], head: int | None = None) -> Values:
        """Return the metric of every sample with the layers in ``ranks`` cut, or one head of them."""
        self.probe.ranks, self.probe.head = ranks, head
        found = {}
        for index in indices:
            found[index] = self.subject.evaluate(index)
            self.progress.update()
        self.probe.ranks, self.probe.head = {}, None
        return found

    def curve(self, layers: Iterable[int], indices: list[int], head: int | None = None) -> Curve:
        """Return a curve without cuts, whose worth is bounded by that of the best constant prediction."""
        layers = list(layers)
        size = max(self.probe.size(self.probe.kind, index) for index in layers)
        uncut = {index: self.uncut[index] for index in indices}

        def compute(rank: int) -> Values:
            return self.evaluate(dict.fromkeys(layers, rank), indices, head)

        return Curve(size, self.subject.metric, uncut, compute, [] if self.constant is None else [self.constant])

    def cut(self, kind: Kind) -> None:
        """Choose what is cut from now on."""
        self.probe.kind = kind
        weights = [layer.output_weight for layer in self.subject.layers]
        self.probe.cuts = {i: found.cut(kind, weights[i]) for i, found in self.probe.layers.items()}

    def scores(self) -> tuple[Curve, dict]:
        """Cut the scores of all heads, and of those of each site. Return the curve of all, and all in words for JSON."""
        self.cut("scores")
        whole = self._whole(self.probe.layers)
        entry = self._entry(whole)
        by_site: dict[str, list[int]] = {}
        for index in self.probe.layers:
            by_site.setdefault(self.subject.layers[index].site, []).append(index)
        several = len(by_site) > 1
        sites = {site: self._entry(self._whole(part)) if several else entry for site, part in by_site.items()}
        return whole, {"all": entry, "sites": sites}

    def values(self) -> dict:
        """Cut the values of all heads."""
        self.cut("values")
        return self._entry(self._whole(self.probe.layers))

    def _whole(self, layers: Iterable[int]) -> Curve:
        """Return the curve of some layers at the grid of ranks, and near the need at each tolerance."""
        curve = self.curve(layers, self.held_out)
        curve.attempt([0])
        curve.nothing.append(curve.found[0])
        if not self.quick:
            curve.attempt(ranks_below(curve.size, few=self.probe.kind != "scores"))
        curve.attempt(bounds(curve.size))  # else an end of the interval may be rounded past one
        for share in self._shares():
            curve.bisect(share)
        return curve

    def _shares(self) -> list[float]:
        return [self.tolerance * step for step in STEPS if self.tolerance * step < 1]

    def _entry(self, curve: Curve) -> dict:
        interval = curve.interval(self.tolerance, self.seed)
        return self._needs(curve, self._shares()) | curve.worths() | {"interval": interval}

    def _needs(self, curve: Curve, shares: list[float]) -> dict:
        found = {"size": curve.size, "need": curve.need(self.tolerance), "ranks": curve.entries()}
        return found | {"needs": [[share, curve.need(share)] for share in shares]}

    def layer(self, index: int, whole: Curve) -> dict:
        """Cut one layer on few sequences, to few ranks. Its cost is a share of what all attention is worth."""
        curve, layer = self.curve([index], self.few), self.subject.layers[index]
        curve.nothing = [*whole.nothing]
        curve.attempt([0, *ranks_below(curve.size, few=True)])
        return {"site": layer.site, "layer": layer.layer} | self._needs(curve, self._shares())

    def heads(self, index: int, whole: Curve) -> list[dict]:
        """Cut each head of a layer alone on few sequences. Its cost is a share of what this head is worth."""
        layer, found, worth = self.subject.layers[index], [], whole.worth(self.few)
        for head in range(layer.heads):
            curve = self.curve([index], self.few, head)
            curve.attempt([0])
            curve.nothing.append(curve.found[0])
            share = curve.worth() / worth if worth > 0 else 0.0
            need = curve.bisect(self.tolerance) if share >= IDLE else 0
            place = {"site": layer.site, "layer": layer.layer, "head": head, "size": curve.size}
            found.append(place | {"need": need, "worth": curve.worth(), "share_of_worth": share})
        return found

    def own(self, whole: Curve) -> dict:
        """Cut all heads by a basis for each sequence alone, below the need of one basis for all."""
        need = whole.need(self.tolerance)
        self.cut("own")
        curve = self.curve(self.probe.layers, self.held_out)
        curve.nothing = whole.nothing
        curve.found |= {rank: whole.found[rank] for rank in (0, need)}
        curve.attempt(rank for rank in ranks_below(need) if not self.quick)
        curve.bisect(self.tolerance)
        entry = self._needs(curve, [self.tolerance])
        return entry | {
            "ranks": [row for row in entry["ranks"] if row["rank"] in (0, curve.size) or row["rank"] < need]
        }

    def passes(self, *, layers: bool, heads: bool) -> int:
        """Return about how many passes of one sequence the measurement takes."""
        every, held_out = self.subject.layers, len(self.held_out)
        size = max(layer.limit for layer in every)
        bisected = math.ceil(math.log2(max(2, size)))
        curves = len({layer.site for layer in every})
        cuts = (_cuts_of_curve(size, quick=self.quick)) * (1 + (curves if curves > 1 else 0)) + bisected
        if not self.quick:
            cuts += _cuts_of_curve(max(layer.head_size for layer in every), few=True)
        single = sum(1 + len(ranks_below(layer.limit, few=True)) for layer in every) if layers else 0
        if heads:
            single += sum(layer.heads * (1 + math.ceil(math.log2(max(2, layer.limit)))) for layer in every)
        prepared = len(self.subject.samples) if self.subject.compares else 0
        return prepared + len(self.basis) + held_out * (1 + cuts) + len(self.few) * single

    def result(self, label: str) -> dict[str, object]:
        """Return what was measured, without the cuts."""
        subject, found = self.subject, self.probe.layers
        runs = {index: max(1, one.calls // len(self.basis)) for index, one in found.items()}
        numbers = {
            "label": label,
            "model": subject.name,
            "about": subject.about,
            "metric": subject.metric.name,
            "unit": subject.metric.unit or subject.metric.name,
            "less_is_better": subject.metric.less_is_better,
            "tolerance": self.tolerance,
            "sequences_of_basis": len(self.basis),
            "tokens_of_basis": min(one.keys.count // runs[index] for index, one in found.items()),
            "sequences_held_out": len(self.held_out),
            "sequences_available": subject.available,
            "mean_length": subject.sequence_length,
            "value": mean(self.uncut),
            "ignorance": subject.metric.ignorance,
            "constant": None if self.constant is None else mean(self.constant),
            "layers": [_describe(subject.layers[i], one, runs[i]) for i, one in found.items()],
            "never_ran": [layer.name for i, layer in enumerate(subject.layers) if i not in found],
        }
        if subject.second is not None:
            numbers |= {"second_metric": subject.second.name, "second_value": mean(self.uncut, part=2)}
        return numbers


def _cuts_of_curve(size: int, *, few: bool = False, quick: bool = False) -> int:
    """Return about how many ranks are tried for one curve: 0, the grid, and the bisections at each tolerance."""
    if quick:
        return 3 + len(STEPS) * max(0, math.ceil(math.log2(max(2, size))) - 2)
    grid = len({*ranks_below(size, few=few), *bounds(size)} - {0})
    return 1 + grid + len(STEPS) * round(math.log2(size / (1 + grid)))


def _describe(layer: Layer, found: LayerStatistics, runs: int) -> dict[str, object]:
    """Return a layer's statistics: means over sequences, of one basis for all sequences, and of the weights alone."""
    kept = {"name": layer.name, "site": layer.site, "layer": layer.layer, "heads": layer.heads}
    kept |= {"head_size": layer.head_size, "limit": layer.limit, "runs": runs}
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
