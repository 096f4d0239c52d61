"""Checks of a model and its data: each yields findings, `check(summary) -> findings`."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import numpy
from fairseq.modules import AdaptiveInput
from torch import nn

from fairseq_lowrank.plugin.embedding import ConvolvedEmbedding
from fairseq_lowrank.progress import tracked
from fairseq_lowrank.tools.advice import measured
from fairseq_lowrank.tools.advice.heads import BOTTLENECK, FINE, NOTE, Change, Finding, head_size_at, value_rank
from fairseq_lowrank.tools.advice.measured import HEAD_EMBEDDINGS
from fairseq_lowrank.tools.axes import config_of, spec_of
from fairseq_lowrank.tools.fairseq.advice.remedies import ModelSummary
from fairseq_lowrank.tools.fairseq.architecture import attention_layers, stacks
from fairseq_lowrank.tools.reporting.papers import poster

WIES = "Wies et al. 2021"
# Wies et al. 2021: §5.1 figure 2, §5.2.2 figure 3, and §5.3 figure 4 (percent redundant by H·d_a / d).
RANK_REDUNDANCY = {"rank": 16, "width": 680, "redundant_percent": 25}
DEPTH_BEATS_WIDTH = {"rank": 500, "width": 504}
WIDE_ATTENTION_REDUNDANT = {4: 25, 16: 45}
# The flags by which the output matrix of a language model is its input embedding.
TIED = ("share_decoder_input_output_embed", "tie_adaptive_weights")
# MHE poster: the least and greatest share, in percent, of mha's score that models with head embeddings keep.
KEPT_BY_MHE = {"WMT'14": (91.5, 96.0), "GLUE, SuperGLUE and SQuAD": (93.2, 98.7)}


def advise(args: Namespace, vocab_size: int, lengths: dict[str, numpy.ndarray]) -> list[Finding]:
    """Return all findings for an architecture's arguments, its vocabulary and the lengths of its data."""
    return advise_on(ModelSummary(args, vocab_size, lengths))


def advise_on(summary: ModelSummary) -> list[Finding]:
    """Return all findings for a summary."""
    return [finding for check in tracked(CHECKS, "advice", "checks") for finding in check(summary)]


def kind_of(summary: ModelSummary) -> str:
    """Return the kind of model, for which this project may have measurements."""
    norms = [bool(getattr(summary.args, f"{stack}_normalize_before", False)) for stack in ("encoder", "decoder")]
    if "cross" in summary.sites:
        return measured.PRE_NORM_TRANSLATION if all(norms) else measured.TRANSLATION
    if "decoder" in summary.sites:
        return measured.LANGUAGE_MODEL if norms[1] else "post-norm decoder"
    return measured.ENCODER


def head_size(summary: ModelSummary) -> Iterator[Finding]:
    """Compare head size with sequence length at every site with known lengths and scores of bounded rank."""
    for site in summary.judged_sites:
        yield head_size_at(site, summary, summary.head_size_remedies(site))


def vocabulary_bottleneck(summary: ModelSummary) -> Iterator[Finding]:
    """Compare the rank of each stack's embedding with its width, and its depth with both."""
    for name, layers, width, heads in stacks(summary.args):
        rank = embedding_rank(summary.model, name, width)
        if rank is not None:
            yield _embedding(summary, name, layers, width, heads, rank)
            yield _depth(summary, name, layers, width, heads, rank)


def _embedding(summary: ModelSummary, stack: str, layers: int, width: int, heads: int, rank: int) -> Finding:
    """Compare the rank of a stack's embedding with its width."""
    of_target = stack == "decoder" and summary.target_vocab_size is not None
    name = "target_vocab_size" if of_target else "vocab_size"
    vocab_size: int = getattr(summary, name)
    numbers = {"stack": stack, "width": width, "embedding_rank": rank, "vocab_size": vocab_size}
    about = f"{stack}: width d = {width}; the input embedding has rank {rank} at most (vocabulary {vocab_size:,})."
    source = f"{WIES}, theorems 1 and 2, §5.1 and §5.2"
    if rank >= width:
        about += " The vocabulary does not cap what the width contributes."
        return Finding("embedding rank", FINE, about, source, numbers)
    text = (
        f"{about} Beyond the rank, width adds little and depth much: deepen rather than widen. In the paper's run with "
        f"rank {DEPTH_BEATS_WIDTH['rank']} the deeper network won from width {DEPTH_BEATS_WIDTH['width']} on. There a rank "
        f"of {RANK_REDUNDANCY['rank']} at width {RANK_REDUNDANCY['width']} made about "
        f"{RANK_REDUNDANCY['redundant_percent']} % of the parameters redundant."
    )
    changes = []
    narrower = rank // heads * heads
    deeper = round(layers * (width / narrower) ** 2) if narrower else 0
    if layers < deeper <= 4 * layers:
        deepen = f"width {narrower} and about {deeper} layers, the feed-forward in proportion"
        changes.append(Change(f"{deepen}, for as many parameters in the layers", None))
    if vocab_size <= rank:
        more = f"a vocabulary of at least {width:,} (subwords in place of characters)"
        larger: dict[str, Any] = {name: width}
        changes += summary.priced(more, **larger)
    elif vocab_size >= width and getattr(summary.args, "embed_rank", None):
        changes += summary.priced("no --embed-rank", embed_rank=None, decoder_input_dim=width)
    elif vocab_size >= width and stack == "decoder":
        tied = any(getattr(summary.args, name, False) for name in TIED)  # then both matrices have one size
        sizes: dict[str, Any] = {"decoder_input_dim": width} | ({"decoder_output_dim": width} if tied else {})
        changes += summary.priced(enough=lambda model: embedding_rank(model, stack, width) == width, **sizes)
    if stack == "decoder" and not getattr(summary.args, "embed_kernel", None):
        kernel = math.ceil(width / rank)
        more = f"--embed-kernel {kernel} (a convolution over the last {kernel} tokens)"
        changes += summary.priced(more, embed_kernel=kernel)
    return Finding("embedding rank", BOTTLENECK, text, source, numbers, changes)


def _depth(summary: ModelSummary, stack: str, layers: int, width: int, heads: int, rank: int) -> Finding:
    """Check the conditions under which the vocabulary-bottleneck theorems are tight: L > log₃ d and H < r."""
    threshold = math.log(width, 3)
    numbers = {
        "stack": stack,
        "layers": layers,
        "log3_width": round(threshold, 2),
        "heads": heads,
        "embedding_rank": rank,
    }
    about = f"{stack}: L = {layers} layers, log₃ d = {threshold:.1f}, H = {heads} heads, embedding rank r = {rank}."
    if layers > threshold and heads < rank:
        about += f" L > log₃ d, for any width below 3^L = {3**layers:,}, and H < r: depth and width both count, up to the rank."
        return Finding("depth", FINE, about, f"{WIES}, theorem 2", numbers)
    reasons, changes = [], []
    if layers <= threshold:
        reasons.append(
            f"With L ≤ log₃ d another layer helps more than more width: L layers are enough for a width below 3^L = {3**layers:,}"
        )
        deep = math.floor(threshold) + 1
        modules = getattr(summary.model, stack).named_modules()
        stacked: Any = next(module for name, module in modules if name.endswith("layers"))
        cost = (deep - layers) * sum(parameter.numel() for parameter in stacked[0].parameters())
        more = summary.cached * (deep - layers) // layers if stack == "decoder" and summary.cached else None
        changes.append(Change(f"--{stack}-layers {deep}", cost, more))
    if heads >= rank:
        reasons.append(
            f"{'with' if reasons else 'With'} H ≥ r the theorem's lower bound is empty: fewer heads, or a higher rank"
        )
    source = f"{WIES}, theorem 2 and §4, after Levine et al. 2020"
    return Finding("depth", NOTE, f"{about} {'; '.join(reasons)}.", source, numbers, changes)


def embedding_rank(model: Any, stack: str, width: int) -> int | None:
    """Return the greatest rank of a stack's input embedding; None if it has no word embeddings."""
    part = getattr(model, stack, None)
    modules = dict(part.named_modules()) if part else {}
    embed = next((module for name, module in modules.items() if name.endswith("embed_tokens")), None)
    if isinstance(embed, AdaptiveInput):
        bands = (module for band in embed.embeddings for module in band.modules() if isinstance(module, nn.Embedding))
        return min(width, sum(min(band.weight.shape) for band in bands))
    if not isinstance(embed, nn.Embedding):
        return None
    convolved = (module.kernel for module in modules.values() if isinstance(module, ConvolvedEmbedding))
    return min(width, next(convolved, 1) * min(embed.weight.shape))


def attention_width(summary: ModelSummary) -> Iterator[Finding]:
    """Compare the attention width H·d_a with the model's width at every site."""
    for site, module in summary.sites.items():
        heads, head_dim, width = module.num_heads, module.head_dim, module.embed_dim
        inner = heads * head_dim
        ratio = inner / width
        numbers = {"site": site, "heads": heads, "head_dim": head_dim, "width": width, "ratio": round(ratio, 3)}
        about = f"{site} attention: internal width H·d_a = {heads}·{head_dim} = {inner}, {ratio:g} times d = {width}."
        source, changes = f"{WIES}, §4.2.3 and §5.3, figure 4", []
        if ratio <= 1:
            yield Finding("attention width", FINE, f"{about} Not above the width.", source, numbers)
            continue
        redundant = ", ".join(f"about {percent} % at {times}" for times, percent in WIDE_ATTENTION_REDUNDANT.items())
        about += (
            " Parameters put inside attention beyond the width are worth less than width: the paper found them "
            f"redundant by {redundant}. A head size above d/H may still pay if n is above it (see head size)."
        )
        changes.append(Change(f"width {inner} with the same heads (T5.1.1 did so)", None))
        if width % heads == 0:
            smaller = width // heads
            if site not in summary.judged_sites or smaller >= summary.wanted_rank(site):
                changes += summary.priced(head_dim=smaller)
            if config_of(module).value_dim > smaller:
                changes += summary.priced(f"--value-dim {smaller} (scores keep their rank)", value_dim=smaller)
        yield Finding("attention width", BOTTLENECK, about, source, numbers, changes)


def value_width(summary: ModelSummary) -> Iterator[Finding]:
    """Compare the size of the values of all heads with the width, and report sites where it is smaller."""
    for site, module in summary.sites.items():
        value_dim, rank, width = config_of(module).value_dim, value_rank(module), module.embed_dim
        if rank >= width:
            continue
        numbers = {"site": site, "value_dim": value_dim, "value_rank": rank, "width": width}
        text = (
            f"{site} attention: the values of all heads, of size d_v = {value_dim}, hold {rank} numbers of a position, of "
            f"d = {width}. No head can pass the rest. Wider values leave queries and keys, and so the scores, as they are."
        )
        full = math.ceil(width * value_dim / rank)
        changes = []
        for size in dict.fromkeys((min(2 * value_dim, full), full)):
            wanted = min(width, size * rank // value_dim)
            changes += summary.priced(enough=lambda model: _value_rank_at(model, site) >= wanted, value_dim=size)  # noqa: B023
        yield Finding("value width", NOTE, text, "the formulas: O_i = P_i (y W_V); docs/evidence.md", numbers, changes)


def _value_rank_at(model: nn.Module, site: str) -> int:
    """Return the least :func:`~.heads.value_rank` of a site's layers."""
    return min(value_rank(layer.module) for layer in attention_layers(model) if layer.site == site)


def composition(summary: ModelSummary) -> Iterator[Finding]:
    """Report compositions that are allowed but have less effect than they seem to."""
    for site, module in summary.sites.items():
        spec = spec_of(module)
        parts = dict(spec.parts)
        numbers = {"site": site, "projection": spec.projection, "mixing": spec.mixing}
        if "mixing" in parts and (note := parts["projection"].mixing_note or parts["mixing"].mixing_note):
            yield Finding("composition", NOTE, f"{site} attention: {note[0]}.", note[1], numbers)


def cost(summary: ModelSummary) -> Iterator[Finding]:
    """Report the parameters that head embeddings would save."""
    if not all(spec_of(module).is_default("projection") for module in summary.sites.values()):
        return
    found = summary.priced(attention=poster()["presets"]["cost"])
    if not found or (saved := -(found[0].parameters or 0)) <= 0:
        return
    kept = "The paper did not measure what that does to a language model."
    if set(summary.sites) != {"decoder"}:
        task = "WMT'14" if "cross" in summary.sites else "GLUE, SuperGLUE and SQuAD"
        metric = "the BLEU score" if task == "WMT'14" else "the scores"
        kept = f"On {task} the paper's models kept {KEPT_BY_MHE[task][0]} to {KEPT_BY_MHE[task][1]} % of {metric}."
    text = (
        f"Attention could be cheaper: head embeddings over one shared projection would save {saved:,} of {summary.total:,} "
        f"parameters. {kept} Here they ended {HEAD_EMBEDDINGS['behind_mha']} bits a token behind plain attention of as many "
        f"parameters, and {HEAD_EMBEDDINGS['ahead_of_sha']} ahead of one shared head (sha; four sentences concatenated, 3 seeds)."
    )
    source = "MHE poster; docs/evidence.md, above the head size"
    yield Finding("cost", NOTE, text, source, {"total": summary.total}, found)


def cache(summary: ModelSummary) -> Iterator[Finding]:
    """Report the cache and the parameters that fewer heads of keys and values would save."""
    if not summary.cached or not (changes := summary.fewer_keys()):
        return
    numbers = {"cached": summary.cached, "after": {one.change: summary.cached + (one.cached or 0) for one in changes}}
    text = (
        f"Decoding keeps {summary.cached:,} numbers of each token. Heads of queries may share heads of keys and values: the rank of "
        "a head's scores stays d_k, while fewer values are averaged. In the paper grouped keys kept a quality close to that of a "
        "key for each head, nearly as fast as one key for all."
    )
    yield Finding("cache", NOTE, text, "Ainslie et al. 2023, abstract", numbers, changes)


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
