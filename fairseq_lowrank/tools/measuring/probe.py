"""Read and cut the scores and values of attention, in the calls that a model makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.ops import AttentionCall, DotProduct, attention
from fairseq_lowrank.tools.measuring.directions import (
    Cut,
    Moments,
    best_cut,
    directions_for,
    energies,
    last_quarter,
    truncate,
)

Kind = Literal["scores", "own", "values"]
"""What is cut: scores by one basis for all sequences, scores of each sequence by a basis for it alone, or values."""
SHARES = {"directions_90": 0.9, "directions_99": 0.99}


def factors(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return for every head the queries ``[B, H, T, E]`` and keys ``[B, H, S, E]`` whose products are its scores, without the scale.

    E is the head size. If scores of heads are mixed, S'_i = Σ_j L[j, i] S_j is the product of the queries L[j, i] q_j and the keys
    k_j of all heads, and E is the sum of their sizes.

    Raises:
        UserError: the scores are not products of queries and keys.
    """
    scores = call.scores
    if not isinstance(scores, DotProduct):
        raise UserError(
            f"{type(scores).__name__} scores are not products of queries and keys, so no rank bounds them. Use a model with "
            "--attention-score dot-product."
        )
    heads = scores.q.size(1)
    if call.score_mixing is None:
        return scores.q, scores.k.repeat_interleave(heads // scores.k.size(1), dim=1)
    every = slice(None)
    mixed = [scores.select_head(every, head, call.score_mixing.column(every, head)) for head in range(heads)]
    return torch.cat([one.q for one in mixed], dim=1), torch.cat([one.k for one in mixed], dim=1)


def cut_call(call: AttentionCall, kind: Kind, cut: Cut, rank: int, head: int | None = None) -> AttentionCall:
    """Return a call whose scores, or values, have at most a rank, by the best map of that rank. At rank 0 all keys are alike.

    Args:
        head: cut the scores of this head alone.
    """
    if kind == "values":
        values = call.v.repeat_interleave(call.scores.shape[1] // call.v.size(1), dim=1)
        return replace(call, v=cut.apply(values, rank))
    queries, keys = factors(call)
    scale = call.dot_product.factor
    if kind == "own":
        queries, keys = truncate(queries, keys, rank)
    else:
        changed = cut.apply(keys, rank)
        keys = changed if head is None else torch.cat([keys[:, :head], changed[:, head, None], keys[:, head + 1 :]], 1)
    return replace(call, scores=DotProduct(queries, keys, scale), score_mixing=None)


@dataclass
class LayerStatistics:
    """What one attention layer did on the sequences of the basis.

    ``sequences`` has a tensor ``[H]`` for each name and sequence. ``calls`` is their number of calls of the layer: a layer whose
    weights are shared, as in ALBERT, runs several times for each sequence.
    """

    queries: Moments
    keys: Moments
    outputs: Moments
    limit: int
    sequences: dict[str, list[Tensor]] = field(default_factory=dict)
    calls: int = 0

    def add(self, queries: Tensor, keys: Tensor, outputs: Tensor) -> None:
        """Add one sequence's queries, keys and outputs of heads, ``[H, T or S, E or Dv]``."""
        here = [Moments(len(part), part.size(-1)) for part in (queries, keys)]
        for one, every, part in zip(here, (self.queries, self.keys), (queries, keys), strict=True):
            one.add(part)
            every.add(part)
        self.outputs.add(outputs)
        found = statistics(energies(here[1].second_centred, here[0].second), self.limit)
        for name, value in found.items():
            self.sequences.setdefault(name, []).append(value)

    def cut(self, kind: Kind, output_weight: Tensor | None) -> Cut:
        """Return the best maps of scores, or of values.

        Args:
            output_weight: W_O of each head, ``[H, Dv, d]``; None, or of other sizes, counts all directions of values alike.
        """
        if kind != "values":
            return best_cut(self.keys.second_centred, self.queries.second, self.keys.mean)
        covariance = self.outputs.covariance
        if output_weight is None or output_weight.shape[:2] != covariance.shape[:2]:
            other = torch.eye(covariance.size(-1), dtype=torch.float64).expand_as(covariance)
        else:
            other = output_weight.double() @ output_weight.double().mT
        return best_cut(covariance, other, self.outputs.mean)


def statistics(found: Tensor, limit: int) -> dict[str, Tensor]:
    """Return the statistics of energies ``[..., E]``; at most ``limit`` of them are not 0."""
    counts = {name: directions_for(found, share).double() for name, share in SHARES.items()}
    return counts | {"last_quarter": last_quarter(found, limit)}


class Probe:
    """Receives the calls of a model's attention layers, and gathers statistics or cuts them.

    Args:
        limits: the greatest rank of a head's scores in each layer.
    """

    def __init__(self, limits: list[int]) -> None:
        self.limits = limits
        self.layers: dict[int, LayerStatistics] = {}
        self.gathering = False
        self.ranks: Mapping[int, int] = {}
        self.kind: Kind = "scores"
        self.cuts: dict[int, Cut] = {}
        self.head: int | None = None

    def __call__(self, layer: int, call: AttentionCall) -> AttentionCall:
        """Return the call that the layer computes instead of the given one."""
        if self.gathering:
            self._gather(layer, call)
        rank = self.ranks.get(layer)
        if rank is None or layer not in self.cuts or rank >= self.size(self.kind, layer):
            return call
        return cut_call(call, self.kind, self.cuts[layer], rank, self.head)

    def size(self, kind: Kind, layer: int) -> int:
        """Return the rank from which a cut changes nothing."""
        return self.layers[layer].outputs.sums.size(-1) if kind == "values" else self.limits[layer]

    def _gather(self, layer: int, call: AttentionCall) -> None:
        queries, keys = factors(call)
        outputs, _ = attention(call)
        if layer not in self.layers:
            shapes = [(part.size(1), part.size(-1)) for part in (queries, keys, outputs)]
            self.layers[layer] = LayerStatistics(*(Moments(*shape) for shape in shapes), limit=self.limits[layer])
        self.layers[layer].calls += 1
        for parts in zip(queries, keys, outputs, strict=True):
            self.layers[layer].add(*parts)
