"""The rule for head sizes: how long sequences may be, for heads whose scores have a given rank (Bhojanapalli et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy

from fairseq_lowrank.attention import AttentionSpec
from fairseq_lowrank.parts import PARTS
from fairseq_lowrank.tools.axes import config_of, score_of, spec_of

BOTTLENECK, WORST, PARTLY, FINE, NOTE = "bottleneck", "worst case", "worst case of longer sequences", "fine", "note"


class Change(NamedTuple):
    """A remedy and its price.

    Args:
        change: flags, or words.
        parameters: the parameters that it adds (negative: saves); None if not counted.
        cached: the numbers that decoding caches of a token in addition; None if nothing is cached, or not counted.
        time: the recorded time of an update, in times of plain attention (see :data:`~.measured.TIMES`); None if not recorded.
    """

    change: str
    parameters: int | None
    cached: int | None = None
    time: float | None = None


@dataclass
class Finding:
    """One piece of advice: what was compared, the verdict in plain words, its source, and remedies with their price."""

    topic: str
    verdict: str
    text: str
    source: str
    numbers: dict
    changes: list[Change] = field(default_factory=list)

    def as_dict(self) -> dict:
        return asdict(self) | {"changes": [change._asdict() for change in self.changes]}


class Heads:
    """The attention of a model, and the lengths of its sequences.

    Args:
        sites: an attention layer for each site.
        lengths: the sequence lengths of each site that is judged.
        causal: the sites whose positions see none after them.
    """

    def __init__(self, sites: dict[str, Any], lengths: dict[str, numpy.ndarray], causal: Collection[str]) -> None:
        self.sites, self.causal = sites, causal
        self.lengths = {site: lengths[site] for site in sites if site in lengths}

    def max_length(self, site: str) -> int:
        """Return the length up to which a site's heads, whose scores have rank r, can produce the attention matrices.

        Without a causal mask the length is r + 1, and every matrix can be produced (Bhojanapalli et al. 2020, Theorem 1,
        whose scores can be moved by a constant a row). Under a causal mask it is 2·r + 1, and almost every matrix can be
        produced: all except a set of measure zero. ``tests/tools/test_causal_heads.py`` constructs the scores.
        """
        return (2 if site in self.causal else 1) * score_rank(self.sites[site]) + 1

    def wanted_rank(self, site: str, length: float | None = None) -> int:
        """Return the least rank of scores that is enough for a length, by default that of 95 % of a site's sequences.

        This is the inverse of :meth:`max_length`.
        """
        length = describe_lengths(self.lengths[site])["p95"] if length is None else length
        return max(1, math.ceil((length - 1) / (2 if site in self.causal else 1)))

    def share_beyond(self, site: str) -> float:
        """Return the share of sequences for which a site's heads are too small."""
        return float((self.lengths[site] > self.max_length(site)).mean())

    @property
    def judged_sites(self) -> list[str]:
        """Sites with known lengths and scores whose rank is bounded."""
        return [site for site in self.lengths if PARTS["score"][spec_of(self.sites[site]).score].bounded_rank]

    @property
    def sites_too_small(self) -> list[str]:
        """Sites whose heads are too small for more than 5 % of the sequences."""
        return [site for site in self.judged_sites if self.share_beyond(site) > 0.05]


def mixes_heads(axis: str, value: str) -> bool:
    """Return True if a value of an axis of mixing gives a head something of another."""
    part = PARTS[axis][value]
    return part is not None and part.mixes_heads


def score_heads(module: Any, spec: AttentionSpec | None = None) -> int:
    """Return the number of heads of keys that each head's scores are made of: one, or all if scores are mixed.

    Args:
        spec: another composition for the layer.
    """
    if not mixes_heads("score_mixing", (spec or spec_of(module)).score_mixing):
        return 1
    return score_of(module, spec).key_heads


def score_rank(module: Any, spec: AttentionSpec | None = None) -> int:
    """Return the greatest rank of a head's scores: min(d, d_k), or min(d, h·d_k) if the scores of h heads are mixed.

    The part of the scores says its own rank, which need not be one of these.

    Args:
        spec: another composition for the layer.
    """
    mixed = mixes_heads("score_mixing", (spec or spec_of(module)).score_mixing)
    return score_of(module, spec).rank(mixed=mixed)


def value_rank(module: Any) -> int:
    """Return the most numbers of a position that the values of all heads hold, for inputs of any width."""
    return config_of(module).build_projection().value_rank


def ranks_by_heads(module: Any) -> dict[int, int]:
    """Return the greatest rank of a head's scores for each number of heads that divides the layer's width.

    The heads have the width's share, and their scores are not mixed. A part whose factors have a given size keeps this size.
    """
    config, width, ranks = config_of(module), module.embed_dim, {}
    spec, groups = config.spec.replace(head_dim=None), config.spec.key_value_heads or 1
    for heads in range(groups, width + 1, groups):
        if width % heads == 0:
            resized = replace(config, spec=spec, num_heads=heads)
            ranks[heads] = resized.build_score(resized.build_projection()).rank(mixed=False)
    return ranks


def heads_of_rank(module: Any, wanted: int) -> int:
    """Return the most heads that divide the layer's width and whose scores have at least this rank; 0 if none have."""
    return max((heads for heads, rank in ranks_by_heads(module).items() if rank >= wanted), default=0)


def describe_lengths(lengths: numpy.ndarray) -> dict[str, float]:
    return {
        "sequences": len(lengths),
        "mean": round(float(lengths.mean()), 1),
        "median": float(numpy.median(lengths)),
        "p95": float(numpy.percentile(lengths, 95)),
        "longest": int(lengths.max()),
    }


def verdict(summary: Heads) -> dict:
    """Return what the worst-case rule says of the sites' heads, and up to how many heads would be large enough for it.

    Returns:
        `too_small` and `large_enough`, lists of sites; `most_heads`, for each site the greatest number of heads that are
        large enough for 95 % of the sequences (0: not even one; None: the number does not matter, because the head size or
        the rank of scores is given, or scores are mixed); and `lines`, sentences that say it.
    """
    short = summary.sites_too_small
    fine = [site for site in summary.judged_sites if site not in short]
    wanted = {site: summary.wanted_rank(site) for site in summary.judged_sites}
    most, lines = {}, []
    for site, rank in wanted.items():
        module = summary.sites[site]
        is_free = spec_of(module).head_dim is None and score_heads(module) == 1
        matters = is_free and len(set(ranks_by_heads(module).values())) > 1
        most[site] = heads_of_rank(module, rank) if matters else None
    if short:
        needs = (f"{site} rank {wanted[site]} (heads have {score_rank(summary.sites[site])})" for site in short)
        lines.append(f"Worst case: some pattern of this length needs {', '.join(needs)}.")
    if fine:
        lines.append(f"Heads large enough for every pattern: {', '.join(fine)}.")
    counts = {None: "any number", 0: "not even one"}
    found = {site: 0 if number is None and site in short else number for site, number in most.items()}
    numbers = ", ".join(f"{site} {counts.get(number, number)}" for site, number in found.items())
    if most:
        lines.append(f"Most heads that are large enough for every pattern in 95 % of the sequences: {numbers}.")
    else:
        lines.append("No site has both known lengths and scores whose rank the head size bounds.")
    return {"too_small": short, "large_enough": fine, "most_heads": most, "lines": lines}


def head_size_at(site: str, summary: Heads, changes: list[Change]) -> Finding:
    """Return what the worst-case rule says of a site."""
    module, spec, lengths = summary.sites[site], spec_of(summary.sites[site]), summary.lengths[site]
    stats, rank, beyond = describe_lengths(lengths), score_rank(module), summary.share_beyond(site)
    mixed, causal = score_heads(module) > 1, site in summary.causal
    numbers = {"site": site, "head_dim": module.head_dim, "heads": module.num_heads, "score_rank": rank}
    numbers |= {"lengths": stats, "share_beyond": beyond}
    limit, kind = ("d_k + 1", "size") if rank == module.head_dim else ("r + 1", "rank")
    limit = f"2·{limit}" if causal else limit
    about = f"{site} attention: head size d_k = {module.head_dim}"
    if mixed:
        about += f", and {module.num_heads} heads whose mixed scores have rank r = {rank} at most"
    elif rank != module.head_dim:
        about += f", and heads whose scores have rank r = {rank} at most"
    if lengths.min() == lengths.max():
        about += f"; sequence length n = {lengths[0]}."
    else:
        about += (
            f"; sequence length n is {stats['mean']:g} on average, {stats['median']:g} in the middle, {stats['p95']:g} at the "
            f"95th percentile; {100 * beyond:.0f} % of the sequences are longer than {limit}."
        )
    enough = (
        ", with a causal mask, d_k = (n − 1)/2 suffices for almost every matrix" if causal else " d_k = n − 1 suffices"
    )
    source = f"Bhojanapalli et al. 2020, Theorem 1; here{enough}"
    if beyond <= 0.05:
        every = "almost every causal" if causal else "every"
        about += f" A head of this {kind} can produce {every} attention matrix of such a length."
        return Finding("head size", FINE, about, source, numbers)
    wanted = summary.wanted_rank(site)
    about += (
        f" Above {limit} there are attention matrices that no head of this {kind} can produce: some pattern of this length "
        f"needs rank {wanted}. Trained heads may need far less; `fairseq-lowrank measure` says how much they use."
    )
    if PARTS["projection"][spec.projection].mixing_note:
        about += " All heads share one matrix here, so mixing them lifts nothing."
    elif mixes_heads("mixing", spec.mixing):
        about += f" Its {module.num_heads} heads are mixed after the softmax. That leaves the rank of a head's scores as it is."
    width = min(module.embed_dim, config_of(module).kdim)
    if width < wanted and spec.is_default("score"):
        about += f" Scores of inputs of width {width} have no higher rank, so no heads in this width are large enough."
    found = WORST if stats["median"] > summary.max_length(site) else PARTLY
    return Finding("head size", found, about, source, numbers, changes)
