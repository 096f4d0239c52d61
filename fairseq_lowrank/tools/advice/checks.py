"""Checks of a model and its data: each yields findings, `check(summary) -> findings`."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy
from fairseq.models.nat import FairseqNATModel
from fairseq.modules import AdaptiveInput
from torch import nn

from fairseq_lowrank.plugin.embedding import ConvolvedEmbedding
from fairseq_lowrank.tools.advice import measured
from fairseq_lowrank.tools.advice.heads import BOTTLENECK, FINE, NOTE, Change, Finding, Heads, head_size_at
from fairseq_lowrank.tools.advice.lengths import lengths_by_site
from fairseq_lowrank.tools.advice.measured import HEAD_EMBEDDINGS
from fairseq_lowrank.tools.advice.remedies import WhatIf, wider_heads
from fairseq_lowrank.tools.architecture import attention_layers, build_model, stacks
from fairseq_lowrank.tools.axes import axes_of, spec_of

MIXHEAD = "Mixhead paper"
WIES = "Wies et al. 2021"
# Wies et al. 2021: §5.1 figure 2, §5.2.2 figure 3, and §5.3 figure 4 (percent redundant by H·d_a / d).
RANK_REDUNDANCY = {"rank": 16, "width": 680, "redundant_percent": 25}
DEPTH_BEATS_WIDTH = {"rank": 500, "width": 504}
WIDE_ATTENTION_REDUNDANT = {4: 25, 16: 45}
# MHE poster: the least and greatest share, in percent, of mha's score that models with head embeddings keep.
KEPT_BY_MHE = {"WMT'14": (91.5, 96.0), "GLUE, SuperGLUE and SQuAD": (93.2, 98.7)}


@dataclass(frozen=True)
class Stack:
    """An encoder or decoder with word embeddings; `rank` is the greatest rank of the embeddings."""

    name: str
    layers: int
    width: int
    heads: int
    rank: int


class ModelSummary(Heads):
    """The input of the checks: a model that is built from its arguments, and the lengths of its data.

    Args:
        args: see :func:`~fairseq_lowrank.tools.architecture.parse_architecture`.
        lengths: see :func:`~.lengths.read_lengths`; sites without lengths are not judged.
    """

    def __init__(self, args: Namespace, vocab_size: int, lengths: dict[str, numpy.ndarray]) -> None:
        self.vocab_size = vocab_size
        self.model = build_model(args, vocab_size)
        self.what_if = WhatIf(args, vocab_size)
        sites: dict[str, nn.Module] = {}
        for layer in attention_layers(self.model):
            sites.setdefault(layer.site, layer.module)
        # every decoder that writes a word after the other is causal
        causal = () if isinstance(self.model, FairseqNATModel) else ("decoder",)
        super().__init__(sites, lengths_by_site(lengths) if lengths else {}, causal)
        norms = [bool(getattr(args, f"{stack}_normalize_before", False)) for stack in ("encoder", "decoder")]
        if "cross" in sites:
            self.kind = measured.PRE_NORM_TRANSLATION if all(norms) else measured.TRANSLATION
        elif "decoder" in sites:
            self.kind = measured.LANGUAGE_MODEL if norms[1] else "post-norm decoder"
        else:
            self.kind = measured.ENCODER
        self.stacks = [
            Stack(name, layers, width, heads, rank)
            for name, layers, width, heads in stacks(args)
            if (rank := embedding_rank(self.model, name, width)) is not None
        ]


def advise(args: Namespace, vocab_size: int, lengths: dict[str, numpy.ndarray]) -> list[Finding]:
    """Return all findings for an architecture's arguments, its vocabulary and the lengths of its data."""
    return advise_on(ModelSummary(args, vocab_size, lengths))


def advise_on(summary: ModelSummary) -> list[Finding]:
    """Return all findings for a summary."""
    return [finding for check in CHECKS for finding in check(summary)]


def head_size(summary: ModelSummary) -> Iterator[Finding]:
    """Compare head size with sequence length at every site with known lengths and scores of bounded rank."""
    wanted = {site: summary.wanted_rank(site, summary.p95(site)) for site in summary.sites_too_small}
    for site in summary.judged_sites:
        changes = []
        if site in wanted:
            changes = summary.what_if.attention_remedies(site, summary.sites, wanted)
            changes += wider_heads(site, summary.sites[site], wanted[site], summary.what_if)
        yield head_size_at(site, summary, changes)


def vocabulary_bottleneck(summary: ModelSummary) -> Iterator[Finding]:
    """Compare the rank of each stack's embedding with its width, and its depth with both."""
    for stack in summary.stacks:
        yield _embedding(stack, summary)
        yield _depth(stack, summary)


def _embedding(stack: Stack, summary: ModelSummary) -> Finding:
    """Compare the rank of a stack's embedding with its width."""
    what_if, vocab_size, rank, width = summary.what_if, summary.vocab_size, stack.rank, stack.width
    numbers = {"stack": stack.name, "width": width, "embedding_rank": rank, "vocab_size": vocab_size}
    about = f"{stack.name}: width d = {width}; the input embedding has rank {rank} at most (vocabulary {vocab_size:,})."
    source = f"{WIES}, theorems 1 and 2, §5.1 and §5.2"
    if rank >= width:
        return Finding(
            "embedding rank", FINE, f"{about} The vocabulary does not cap what the width contributes.", source, numbers
        )
    text = (
        f"{about} Beyond the rank, width adds little and depth much: deepen rather than widen. In the paper's run with "
        f"rank {DEPTH_BEATS_WIDTH['rank']} the deeper network won from width {DEPTH_BEATS_WIDTH['width']} on. There a rank "
        f"of {RANK_REDUNDANCY['rank']} at width {RANK_REDUNDANCY['width']} made about "
        f"{RANK_REDUNDANCY['redundant_percent']} % of the parameters redundant."
    )
    changes = []
    narrower = rank // stack.heads * stack.heads
    deeper = round(stack.layers * (width / narrower) ** 2) if narrower else 0
    if stack.layers < deeper <= 4 * stack.layers:
        deepen = f"width {narrower} and about {deeper} layers, the feed-forward in proportion"
        changes.append(Change(f"{deepen}, for as many parameters in the layers", None))
    if vocab_size <= rank:
        more = f"a vocabulary of at least {width:,} (subwords in place of characters)"
        changes += what_if.priced(more, vocab_size=width)
    elif vocab_size >= width and getattr(what_if.args, "embed_rank", None):
        changes += what_if.priced("no --embed-rank", embed_rank=None, decoder_input_dim=width)
    elif vocab_size >= width and stack.name == "decoder":
        changes += what_if.priced(decoder_input_dim=width)
    if stack.name == "decoder" and not getattr(what_if.args, "embed_kernel", None):
        kernel = math.ceil(width / rank)
        changes += what_if.priced(
            f"--embed-kernel {kernel} (a convolution over the last {kernel} tokens)", embed_kernel=kernel
        )
    return Finding("embedding rank", BOTTLENECK, text, source, numbers, changes)


def _depth(stack: Stack, summary: ModelSummary) -> Finding:
    """Check the conditions under which the vocabulary-bottleneck theorems are tight: L > log₃ d and H < r."""
    layers, heads, rank = stack.layers, stack.heads, stack.rank
    threshold = math.log(stack.width, 3)
    per_layer = sum(parameter.numel() for parameter in _layers(summary.model, stack.name)[0].parameters())
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
    more = math.floor(threshold) + 1 - layers
    changes = [Change(f"--{stack.name}-layers {layers + more}", more * per_layer)] if more > 0 else []
    text = f"{about} {'; '.join(reasons)[0].upper()}{'; '.join(reasons)[1:]}."
    return Finding("depth", NOTE, text, f"{WIES}, theorem 2 and §4, after Levine et al. 2020", numbers, changes)


def embedding_rank(model: nn.Module, stack: str, width: int) -> int | None:
    """Return the greatest rank of a stack's input embedding; None if it has no word embeddings."""
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


def attention_width(summary: ModelSummary) -> Iterator[Finding]:
    """Compare the attention width H·d_a with the model's width at every site."""
    for site, module in summary.sites.items():
        yield _attention_width_at(site, module, summary)


def _attention_width_at(site: str, module: nn.Module, summary: ModelSummary) -> Finding:
    what_if = summary.what_if
    heads, head_dim, width = module.num_heads, module.head_dim, module.embed_dim
    ratio = heads * head_dim / width
    numbers = {"site": site, "heads": heads, "head_dim": head_dim, "width": width, "ratio": round(ratio, 3)}
    about = f"{site} attention: internal width H·d_a = {heads}·{head_dim} = {heads * head_dim}, {ratio:g} times d = {width}."
    source = f"{WIES}, §4.2.3 and §5.3, figure 4"
    if ratio <= 1:
        return Finding("attention width", FINE, f"{about} Not above the width.", source, numbers)
    measured = ", ".join(f"about {percent} % at {times}" for times, percent in WIDE_ATTENTION_REDUNDANT.items())
    text = (
        f"{about} Parameters put inside attention beyond the width are worth less than width: the paper found them "
        f"redundant by {measured}. A head size above d/H may still pay if n is above it (see head size)."
    )
    changes = [Change(f"width {heads * head_dim} with the same heads (T5.1.1 did so)", None)]
    if width % heads == 0:
        smaller = width // heads
        if not (site in summary.judged_sites and smaller < summary.wanted_rank(site, summary.p95(site))):
            changes += what_if.priced(head_dim=smaller)
        changes += what_if.priced(f"--value-dim {smaller} (scores keep their rank)", value_dim=smaller)
    return Finding("attention width", BOTTLENECK, text, source, numbers, changes)


def value_width(summary: ModelSummary) -> Iterator[Finding]:
    """Compare the size of the values of all heads with the width, and report sites where it is smaller."""
    for site, module in summary.sites.items():
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
        changes = [change for size in wider for change in summary.what_if.priced(value_dim=size)]
        yield Finding("value width", NOTE, text, "the formulas: O_i = P_i (y W_V); docs/evidence.md", numbers, changes)


def _count(number: int, what: str) -> str:
    return f"one {what}" if number == 1 else f"{number} {what}s"


def composition(summary: ModelSummary) -> Iterator[Finding]:
    """Report compositions that are allowed but have less effect than they seem to."""
    for site, module in summary.sites.items():
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


def cost(summary: ModelSummary) -> Iterator[Finding]:
    """Report the parameters that head embeddings would save."""
    if any(spec_of(module).projection != "independent" for module in summary.sites.values()):
        return
    what_if = summary.what_if
    found = what_if.priced(attention="mhe-mul")
    if not found or found[0].parameters >= 0:
        return
    text = (
        f"Attention could be cheaper: head embeddings over one shared projection would save {-found[0].parameters:,} of "
        f"{what_if.total:,} parameters. {_score_kept(summary)} Here they ended {HEAD_EMBEDDINGS['behind_mha']} bits a "
        f"token behind plain attention of as many parameters, and {HEAD_EMBEDDINGS['ahead_of_sha']} ahead of one shared "
        "head (sha; four sentences concatenated, 3 seeds)."
    )
    source = "MHE poster; docs/evidence.md, above the head size"
    yield Finding("cost", NOTE, text, source, {"total": what_if.total}, found)


def _score_kept(summary: ModelSummary) -> str:
    """Return the MHE poster's result for head embeddings in such models, as a sentence."""
    if set(summary.sites) == {"decoder"}:
        return "The paper did not measure what that does to a language model."
    task = "WMT'14" if "cross" in summary.sites else "GLUE, SuperGLUE and SQuAD"
    least, most = KEPT_BY_MHE[task]
    metric = "the BLEU score" if task == "WMT'14" else "the scores"
    return f"On {task} the paper's models kept {least} to {most} % of {metric}."


def cache(summary: ModelSummary) -> Iterator[Finding]:
    """Report the cache and the parameters that fewer heads of keys and values would save."""
    what_if = summary.what_if
    if "decoder" not in summary.sites or not what_if.possible:
        return
    changes = [found for change in what_if.fewer_keys(summary.sites) for found in what_if.priced(**change)]
    if not changes:
        return
    now = what_if.cached
    kept = {found.change: now + found.cached for found in changes}
    text = (
        f"Decoding keeps {now:,} numbers of each token. Heads of queries may share heads of keys and values: the rank of a head's "
        "scores stays d_k, while fewer values are averaged. In the paper grouped keys kept a quality close to that of a key for "
        "each head, nearly as fast as one key for all."
    )
    yield Finding("cache", NOTE, text, "Ainslie et al. 2023, abstract", {"cached": now, "after": kept}, changes)


CHECKS: tuple[Callable[[ModelSummary], Iterator[Finding]], ...] = (
    head_size,
    vocabulary_bottleneck,
    attention_width,
    value_width,
    composition,
    cost,
    cache,
)
"""Every check, in the order in which findings are printed."""
