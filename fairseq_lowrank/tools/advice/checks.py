"""The checks: each looks at the facts of a model and its data and gives findings, `check(facts) -> findings`."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property

import numpy
from fairseq.models.nat import FairseqNATModel
from fairseq.modules import AdaptiveInput
from torch import nn

from fairseq_lowrank.plugin.embedding import ConvolvedEmbedding
from fairseq_lowrank.tools.advice.lengths import describe_lengths, lengths_by_site
from fairseq_lowrank.tools.advice.remedies import (
    LIFTS_NOTHING,
    Variants,
    as_flags,
    cached,
    score_heads,
    score_rank,
    wider_heads,
)
from fairseq_lowrank.tools.architecture import attention_layers, axes_of, build, spec_of, stacks
from fairseq_lowrank.tools.papers import load_papers
from fairseq_lowrank.tools.parameters import count

BOTTLENECK, PARTLY, FINE, NOTE = "bottleneck", "partly", "fine", "note"
FIXEDHEAD = "Bhojanapalli et al. 2020, Theorem 1"
MIXHEAD = "Mixhead paper"
WIES = "Wies et al. 2021"
UNBOUNDED = ("synthesizer-random", "relative")
"""Scores whose rank the head size does not bound: free numbers, and products that are shifted row by row."""


@dataclass
class Finding:
    """One piece of advice: what was compared, the verdict in plain words, its source, and changes with their cost.

    `changes` are pairs of flags and the parameters that they add (negative: save; None: not counted).
    """

    topic: str
    verdict: str
    text: str
    source: str
    numbers: dict
    changes: list[tuple[str, int | None]] = field(default_factory=list)

    def as_dict(self) -> dict:
        changes = [{"change": change, "parameters": parameters} for change, parameters in self.changes]
        return asdict(self) | {"changes": changes}


@dataclass(frozen=True)
class Stack:
    """An encoder or decoder whose words have embeddings; `rank` is the greatest that these can have."""

    name: str
    layers: int
    width: int
    heads: int
    rank: int


class Facts:
    """What the checks read: a model built from its arguments, and its data.

    Args:
        args: see :func:`~fairseq_lowrank.tools.architecture.parse`.
        lengths: see :func:`~.lengths.read_lengths`; what is absent is not judged.
    """

    def __init__(self, args: Namespace, vocab_size: int, lengths: dict[str, numpy.ndarray]) -> None:
        self.vocab_size = vocab_size
        self.model = build(args, vocab_size)
        self.variants = Variants(args, vocab_size)
        self.sites: dict[str, nn.Module] = {}
        for layer in attention_layers(self.model):
            self.sites.setdefault(layer.site, layer.module)
        lengths = lengths_by_site(lengths) if lengths else {}
        self.lengths = {site: lengths[site] for site in self.sites if site in lengths}
        self.stacks = [
            Stack(name, layers, width, heads, rank)
            for name, layers, width, heads in stacks(args)
            if (rank := embedding_rank(self.model, name, width)) is not None
        ]

    @cached_property
    def papers(self) -> dict:
        return load_papers()

    def is_causal(self, site: str) -> bool:
        """Whether a site's positions see none after them, as in every decoder that writes a word after the other."""
        return site == "decoder" and not isinstance(self.model, FairseqNATModel)

    def longest(self, site: str) -> int:
        """The length up to which a site's heads, whose scores have rank r, can produce every attention matrix.

        r + 1 (Bhojanapalli et al. 2020, Theorem 1, whose scores can be moved by a constant a row). Under a causal mask 2·r + 1: what
        is hidden is free, and the largest block that is not, positions r + 1 to 2·r + 1 before themselves and all earlier ones, has r + 1
        rows; ``tests/tools/test_causal_heads.py`` constructs the scores.
        """
        rank = score_rank(self.sites[site])
        return 2 * rank + 1 if self.is_causal(site) else rank + 1

    def wanted(self, site: str, length: float) -> int:
        """The size of heads, a multiple of which their scores have as rank, that is enough for a length."""
        return math.ceil((length / 2 if self.is_causal(site) else length) / score_heads(self.sites[site]))

    def share_beyond(self, site: str) -> float:
        """The share of sequences for which a site's heads can't produce every attention matrix."""
        return float((self.lengths[site] > self.longest(site)).mean())


def advise(args: Namespace, vocab_size: int, lengths: dict[str, numpy.ndarray]) -> list[Finding]:
    """All findings for an architecture's arguments, its vocabulary and the lengths of its data, see :class:`Facts`."""
    return advise_on(Facts(args, vocab_size, lengths))


def advise_on(facts: Facts) -> list[Finding]:
    """All findings for facts that are known already."""
    return [finding for check in CHECKS for finding in check(facts)]


def head_size(facts: Facts) -> Iterator[Finding]:
    """Head size against sequence length at every site whose lengths are known, and whose scores have a rank of at most d_k."""
    sites = [site for site in facts.lengths if spec_of(facts.sites[site]).score not in UNBOUNDED]
    short = [site for site in sites if facts.share_beyond(site) > 0.05]
    wanted = {site: facts.wanted(site, describe_lengths(facts.lengths[site])["p95"]) for site in short}
    for site in sites:
        changes = []
        if site in short:
            changes = facts.variants.attention_remedies(site, facts.sites, wanted)
            changes += wider_heads(site, facts.sites[site], wanted[site], facts.variants)
        yield _head_size_at(site, facts, changes)


def _head_size_at(site: str, facts: Facts, changes: list[tuple[str, int | None]]) -> Finding:
    module, lengths = facts.sites[site], facts.lengths[site]
    head_dim, heads, stats = module.head_dim, module.num_heads, describe_lengths(lengths)
    rank, mixed_scores = score_rank(module), score_heads(module) > 1
    beyond, limit = facts.share_beyond(site), "r + 1" if mixed_scores else "d_k + 1"
    if facts.is_causal(site):
        limit = f"2·{limit}"
    numbers = {
        "site": site,
        "head_dim": head_dim,
        "heads": heads,
        "score_rank": rank,
        "lengths": stats,
        "share_beyond": beyond,
    }
    length = (
        f"sequence length n is {stats['mean']:g} on average, {stats['median']:g} in the middle, {stats['p95']:g} at the "
        f"95th percentile; {100 * beyond:.0f} % of the sequences are longer than {limit}."
        if lengths.min() < lengths.max()
        else f"sequence length n = {lengths[0]}."
    )
    size = f"head size d_k = {head_dim}"
    if mixed_scores:
        size += f", and {heads} heads whose mixed scores have rank r = {rank} at most"
    about = f"{site} attention: {size}; {length}"
    evidence, tables = _mixing_evidence(facts, short=beyond <= 0.05)
    if beyond <= 0.05:
        text = f"{about} A head of this {'rank' if mixed_scores else 'size'} can produce any attention matrix of such a length."
        text += "" if mixed_scores else f" {evidence}"
        return Finding("head size", FINE, text, f"{FIXEDHEAD}; {tables}", numbers)
    spec = spec_of(module)
    text = f"{about} Above {limit} there are attention matrices that no head of this {'rank' if mixed_scores else 'size'} can produce. "
    if spec.projection == "single":
        text += "All heads share one matrix here, so mixing them lifts nothing."
    elif spec.mixing not in LIFTS_NOTHING:
        text += f"Its {heads} heads are mixed, which lifts the rank of what they produce."
    else:
        text += evidence
    verdict = BOTTLENECK if stats["median"] > facts.longest(site) else PARTLY
    suffices = (
        "here, with a causal mask: d_k = (n − 1)/2 suffices" if facts.is_causal(site) else "here: d_k = n − 1 suffices"
    )
    return Finding("head size", verdict, text, f"{FIXEDHEAD}; {suffices}; {tables}", numbers, changes)


def _mixing_evidence(facts: Facts, *, short: bool) -> tuple[str, str]:
    """What the Mixhead paper measured nearest to this case, and where."""
    tables = facts.papers["mixhead"]["tables"]
    task = "pairs" if "cross" in facts.sites else "text"
    metric, name = ("perplexity", "table3" if short else "table1") if task == "text" else ("bleu", "table4")
    score = {row["row"]: row["values"][metric]["test"] for row in tables[name]["rows"]}
    if task == "text":
        row, case = ("transformer-xl", "d_k = 128 and n = 32") if short else ("baevski", "d_k = 128 and n = 512")
        base, a, b = (score[f"{row}-{kind}"] for kind in ("mha", "mixhead-a", "mixhead-b"))
        text = f"Mixing heads took a language model with {case} from perplexity {base} to {a} (A) and {b} (B)."
    elif short:
        a, b = (score["h4-mha"] - score[f"h4-mixhead-{kind}"] for kind in "ab")
        text = f"Mixing heads does not help here: with d_k = 128 and n ≈ 24 it cost {a:.2f} (A) and {b:.2f} (B) BLEU."
    else:
        a, b = (score[f"h64-mixhead-{kind}"] - score["h64-mha"] for kind in "ab")
        text = (
            f"Mixing heads is the cheap way out: with d_k = 8 and n ≈ 24 it gained {a:.2f} (A) and {b:.2f} (B) BLEU; "
            "with d_k = 16, not far below n, it gained nothing."
        )
    return text, f"{MIXHEAD}, {name.replace('table', 'table ')}"


def vocabulary_bottleneck(facts: Facts) -> Iterator[Finding]:
    """The rank of each stack's embedding against its width, and its depth against both."""
    for stack in facts.stacks:
        yield _embedding(stack, facts)
        yield _depth(stack, facts)


def _embedding(stack: Stack, facts: Facts) -> Finding:
    """min(embedding rank, vocabulary) against width."""
    found = facts.papers["vocabulary_bottleneck"]["findings"]
    variants, vocab_size, rank, width = facts.variants, facts.vocab_size, stack.rank, stack.width
    numbers = {"stack": stack.name, "width": width, "embedding_rank": rank, "vocab_size": vocab_size}
    about = f"{stack.name}: width d = {width}; the input embedding has rank {rank} at most (vocabulary {vocab_size:,})."
    source = f"{WIES}, theorems 1 and 2, §5.1 and §5.2"
    if rank >= width:
        return Finding(
            "embedding rank", FINE, f"{about} The vocabulary does not cap what the width contributes.", source, numbers
        )
    crossing, redundancy = found["depth_beats_width_r500"], found["rank_redundancy"]
    low, full = redundancy["rank_over_width"]
    text = (
        f"{about} Beyond the rank, width adds little and depth much: deepen rather than widen. In the paper's run with "
        f"rank {crossing['rank']} the deeper network won from width {crossing['width_at_crossing']} on, and a rank of "
        f"{low} at width {full} made about {redundancy['redundant_percent']} % of the parameters redundant."
    )
    changes = []
    narrower = rank // stack.heads * stack.heads
    deeper = round(stack.layers * (width / narrower) ** 2) if narrower else 0
    if stack.layers < deeper <= 4 * stack.layers:
        deepen = f"width {narrower} and about {deeper} layers, the feed-forward in proportion"
        changes.append((f"{deepen}, for as many parameters in the layers", None))
    if vocab_size <= rank:
        more = f"a vocabulary of at least {width:,} (sub-words in place of characters)"
        changes.append((more, variants.cost(vocab_size=width)))
    elif getattr(variants.args, "embed_rank", None):
        changes.append(("no --embed-rank", variants.cost(embed_rank=None, decoder_input_dim=width)))
    elif stack.name == "decoder":
        changes.append((f"--decoder-input-dim {width}", variants.cost(decoder_input_dim=width)))
    if stack.name == "decoder" and not getattr(variants.args, "embed_kernel", None):
        kernel = math.ceil(width / rank)
        if (cost := variants.cost(embed_kernel=kernel)) is not None:
            changes.append((f"--embed-kernel {kernel} (a convolution over the last {kernel} tokens)", cost))
    return Finding("embedding rank", BOTTLENECK, text, source, numbers, changes)


def _depth(stack: Stack, facts: Facts) -> Finding:
    """The regime in which the vocabulary-bottleneck theorems are tight: L > log₃ d and H < r."""
    layers, heads, rank = stack.layers, stack.heads, stack.rank
    threshold = math.log(stack.width, 3)
    per_layer = sum(parameter.numel() for parameter in _layers(facts.model, stack.name)[0].parameters())
    numbers = {
        "stack": stack.name,
        "layers": layers,
        "log3_width": round(threshold, 2),
        "heads": heads,
        "embedding_rank": rank,
    }
    about = (
        f"{stack.name}: L = {layers} layers, log₃ d = {threshold:.1f}, H = {heads} heads, embedding rank r = {rank}."
    )
    if layers > threshold and heads < rank:
        text = (
            f"{about} L > log₃ d, for any width below 3^L = {3**layers:,}, and H < r: depth and width both count, up to the "
            "rank."
        )
        return Finding("depth", FINE, text, f"{WIES}, theorem 2", numbers)
    reasons = []
    if layers <= threshold:
        reasons.append(
            f"with L ≤ log₃ d another layer helps more than more width: L layers are enough for a width below 3^L = {3**layers:,}"
        )
    if heads >= rank:
        reasons.append("with H ≥ r the theorem's lower bound is empty: fewer heads, or a higher rank")
    changes = [("one more layer", per_layer)] if layers <= threshold else []
    text = f"{about} {'; '.join(reasons)[0].upper()}{'; '.join(reasons)[1:]}."
    return Finding("depth", NOTE, text, f"{WIES}, theorem 2 and §4, after Levine et al. 2020", numbers, changes)


def embedding_rank(model: nn.Module, stack: str, width: int) -> int | None:
    """The greatest rank that a stack's input embedding can have, None without word embeddings."""
    part = getattr(model, stack, None)
    embed = (
        next((module for name, module in part.named_modules() if name.endswith("embed_tokens")), None) if part else None
    )
    if isinstance(embed, AdaptiveInput):
        bands = [
            next(module for module in band.modules() if isinstance(module, nn.Embedding)) for band in embed.embeddings
        ]
        return min(width, sum(min(band.weight.shape) for band in bands))
    if not isinstance(embed, nn.Embedding):
        return None
    convolved = (module.kernel for module in part.modules() if isinstance(module, ConvolvedEmbedding))
    return min(width, next(convolved, 1) * min(embed.weight.shape))


def _layers(model: nn.Module, stack: str) -> nn.ModuleList:
    part = getattr(model, stack)
    return next(module for name, module in part.named_modules() if name.endswith("layers"))


def attention_width(facts: Facts) -> Iterator[Finding]:
    """H·d_a against width at every site."""
    found = facts.papers["vocabulary_bottleneck"]["findings"]
    for site, module in facts.sites.items():
        yield _attention_width_at(site, module, found, facts.variants)


def _attention_width_at(site: str, module: nn.Module, found: dict, variants: Variants) -> Finding:
    heads, head_dim, width = module.num_heads, module.head_dim, module.embed_dim
    ratio = heads * head_dim / width
    numbers = {"site": site, "heads": heads, "head_dim": head_dim, "width": width, "ratio": round(ratio, 3)}
    about = f"{site} attention: internal width H·d_a = {heads}·{head_dim} = {heads * head_dim}, {ratio:g} times d = {width}."
    source = f"{WIES}, §4.2.3 and §5.3, figure 4"
    if ratio <= 1:
        return Finding("attention width", FINE, f"{about} Not above the width.", source, numbers)
    measured = ", ".join(
        f"about {found[f'attention_width_{times}']['redundant_percent']} % at {times}" for times in (4, 16)
    )
    text = (
        f"{about} Parameters put inside attention beyond the width are worth less than width: the paper found them "
        f"redundant by {measured}. A head size above d/H may still pay where n is above it (see head size)."
    )
    changes = [(f"width {heads * head_dim} with the same heads (T5.1.1 did so)", None)]
    if width % heads == 0:
        changes.append((f"--head-dim {width // heads}", variants.cost(head_dim=width // heads)))
        if (narrower := variants.cost(value_dim=width // heads)) is not None:
            changes.append((f"--value-dim {width // heads} (scores keep their rank)", narrower))
    return Finding("attention width", BOTTLENECK, text, source, numbers, changes)


def value_width(facts: Facts) -> Iterator[Finding]:
    """What the values of all heads hold of a position, against width, where that is less."""
    for site, module in facts.sites.items():
        axes = axes_of(module)
        heads, value_dim, width = axes["key_value_heads"], axes["value_dim"], module.embed_dim
        if heads * value_dim >= width:
            continue
        numbers = {"site": site, "key_value_heads": heads, "value_dim": value_dim, "width": width}
        text = (
            f"{site} attention: {_count(heads, 'value')} of size d_v = {value_dim} hold{'s' if heads == 1 else ''} "
            f"{heads * value_dim} numbers of a position, of d = {width}; the rest passes no head, whatever its weights. "
            "Wider values leave queries and keys, and so the scores, as they are."
        )
        full = math.ceil(width / heads)
        wider = [size for size in dict.fromkeys((min(2 * value_dim, full), full))]
        costs = [(f"--value-dim {size}", facts.variants.cost(value_dim=size)) for size in wider]
        changes = [(change, cost) for change, cost in costs if cost is not None]
        yield Finding("value width", NOTE, text, "the formulas: O_i = P_i (y W_V); docs/evidence.md", numbers, changes)


def _count(number: int, what: str) -> str:
    return f"one {what}" if number == 1 else f"{number} {what}s"


def composition(facts: Facts) -> Iterator[Finding]:
    """Compositions that are allowed but do less than they seem to."""
    for site, module in facts.sites.items():
        spec = spec_of(module)
        if spec.mixing == "none":
            continue
        numbers = {"site": site, "projection": spec.projection, "mixing": spec.mixing}
        if spec.projection == "single":
            text = f"{site} attention: the heads of `single` projections are identical, so mixing them is only a gate for each head."
            yield Finding("composition", NOTE, text, "the formulas: Σ_j M[j,i] P = (Σ_j M[j,i]) P", numbers)
        elif spec.mixing == "average":
            text = (
                f"{site} attention: averaged heads share one attention matrix, so h heads are one with more parameters."
            )
            yield Finding("composition", NOTE, text, f"{MIXHEAD}, §4.4.2, table 7", numbers)
        elif spec.mixing == "diagonal":
            text = f"{site} attention: a gain for each head is a scale that the output projection could hold: it lifts no rank."
            yield Finding(
                "composition", NOTE, text, "the formulas: Σ_i w_i P_i V_i W_i = Σ_i P_i V_i (w_i W_i)", numbers
            )


def cost(facts: Facts) -> Iterator[Finding]:
    """What head embeddings would save."""
    if any(spec_of(module).projection != "independent" for module in facts.sites.values()):
        return
    variants = facts.variants
    saved = variants.cost(attention="mhe-mul")
    if saved is None or saved >= 0:
        return
    kept, source = _score_kept(facts)
    text = (
        f"Attention could be cheaper: head embeddings over one shared projection would save {-saved:,} of "
        f"{variants.total:,} parameters; {kept}."
    )
    yield Finding("cost", NOTE, text, source, {"total": variants.total}, [("--attention mhe-mul", saved)])


def _score_kept(facts: Facts) -> tuple[str, str]:
    """What models with head embeddings kept of their score where the poster measured the like, and where it says so."""
    if set(facts.sites) == {"decoder"}:
        return "what that does to a language model the poster did not measure", "MHE poster"
    name, task = ("wmt14", "WMT'14") if "cross" in facts.sites else ("encoder", "GLUE, SuperGLUE and SQuAD")
    metrics = "the BLEU score" if name == "wmt14" else "the scores"
    rows = facts.papers["mhe"]["tables"][name]["rows"]
    kept = [share for row in rows if "mhe" in row["row"] for share in row.get("prr", {}).values()]
    table = "WMT'14 table" if name == "wmt14" else "table of encoders"
    return f"on {task} such models kept {min(kept)} to {max(kept)} % of {metrics}", f"MHE poster, {table}"


def cache(facts: Facts) -> Iterator[Finding]:
    """What fewer heads of keys and values would save while decoding, and in parameters."""
    variants = facts.variants
    if "decoder" not in facts.sites or not variants.possible:
        return
    now, kept, changes = cached(variants.changed()), {}, []
    for change in variants.fewer_keys(facts.sites):
        if (model := variants.changed(**change)) is not None:
            flags, kept_then = as_flags(change), cached(model)
            kept[flags] = kept_then
            saved = count(model)["total"] - variants.total
            changes.append((f"{flags} (keeps {kept_then:,} numbers of a token)", saved))
    if not changes:
        return
    text = (
        f"Decoding keeps {now:,} numbers of each token. Heads of queries may share heads of keys and values: the rank of a head's "
        "scores stays d_k, while fewer values are averaged. In the paper grouped keys kept a quality close to that of a key for "
        "each head, nearly as fast as one key for all."
    )
    yield Finding("cache", NOTE, text, "Ainslie et al. 2023, abstract", {"cached": now, "after": kept}, changes)


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    head_size,
    vocabulary_bottleneck,
    attention_width,
    value_width,
    composition,
    cost,
    cache,
)
"""Every check, in the order in which findings are told."""
