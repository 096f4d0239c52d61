"""Heads with smaller queries and keys, and values as they were: the best maps for data, multiplied into the weights.

A head's scores q·k become (q A)·(k C) with A, C: d_k × r. Heads that share a key share C, so a token caches r numbers for each key
head. Among all maps of rank r, C Aᵀ has the least mean square of the change of scores, for the second moments of this data
(:mod:`.measuring.directions`). Then A and C are fitted to the patterns of the wide layer, by their KL divergence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_lowrank.attention import MultiheadAttention
from fairseq_lowrank.attention.classes import with_choices
from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.ops import AttentionCall, DotProduct, attention
from fairseq_lowrank.progress import tracked
from fairseq_lowrank.tools.measuring.directions import Moments, best_cut
from fairseq_lowrank.tools.measuring.layers import LayerSubject
from fairseq_lowrank.tools.measuring.subject import Metric, Subject

STEPS, RATE, WARMUP = 64, 0.03, 10
"""Steps of the fit of a layer, the size of a step as a share of the maps' root mean square, and steps of rising rate."""
LOSS = "queries and keys keep fewer directions"
"""Why the outputs of a narrowed layer differ."""


class Maps(NamedTuple):
    """The maps of a layer: q ↦ q A for each head, k ↦ k C for each head of keys.

    Args:
        queries: A, ``[H, d_k, r]``.
        keys: C, ``[G, d_k, r]``.
    """

    queries: Tensor
    keys: Tensor


def best_maps(queries: Tensor, keys: Tensor, rank: int) -> Maps:
    """Return the best maps for the second moments of queries ``[H, d_k, d_k]`` and of keys ``[G, d_k, d_k]``."""
    group = len(queries) // len(keys)
    cut = best_cut(keys, queries.unflatten(0, (len(keys), group)).sum(1), torch.zeros_like(keys[..., 0]))
    return Maps(cut.up[:, :rank].mT.repeat_interleave(group, 0).contiguous(), cut.down[..., :rank].contiguous())


def maps_of_weights(layer: MultiheadAttention, rank: int) -> Maps:
    """Return the best maps if inputs are white: independent, of mean 0 and variance 1.

    Raises:
        UserError: the layer's weights cannot take maps.
    """
    check_narrow(layer, rank)
    moments = []
    for module, heads in ((layer.q_proj, layer.num_heads), (layer.k_proj, layer.projection.state_heads)):
        weight = module.weight.detach().double()
        if module.bias is not None and module is layer.q_proj:
            weight = torch.cat([weight, module.bias.detach().double()[:, None]], 1)
        weight = weight.unflatten(0, (heads, -1))
        moments.append(weight @ weight.mT)
    return best_maps(moments[0], moments[1], rank)


def maps_of_data(subject: Subject, rank: int, *, steps: int = STEPS, centred: bool | None = None) -> dict[str, Maps]:
    """Return the maps of each layer, by its name, for the samples of a subject.

    Args:
        subject: the wide model. Its samples have no padding.
        steps: of the fit of each layer, with one call a step; 0 keeps the best maps.
        centred: subtract the mean over a sequence from the keys, which softmax ignores in rows that see all keys. None does
            what costs less on these samples.

    Raises:
        UserError: a layer was not called.
    """
    moments: dict[int, tuple[Moments, Moments]] = {}

    def gather(index: int, call: AttentionCall) -> AttentionCall:
        parts = call.dot_product.q, call.dot_product.k
        if index not in moments:
            queries, keys = (Moments(part.size(1), part.size(-1)) for part in parts)
            moments[index] = queries, keys
        for one, part in zip(moments[index], parts, strict=True):
            for vectors in part:
                one.add(vectors)
        return call

    indices = range(len(subject.samples))
    with torch.no_grad(), subject.hooked(gather):
        for index in indices:
            subject.evaluate(index)
    found = {}
    for number, layer in enumerate(tracked(subject.layers, "fitting maps", "layers")):
        if number not in moments:
            raise UserError(f"{layer.name} never ran on these sequences, so it has no maps. Give other sequences.")
        queries, keys = moments[number]
        calls = _calls(subject, number)
        kinds = (True, False) if centred is None else (centred,)
        starts = [best_maps(queries.second, keys.second_centred if kind else keys.second, rank) for kind in kinds]
        start = starts[0] if len(starts) == 1 else min(starts, key=lambda maps: divergence(calls, maps))
        found[layer.name] = fitted(calls, start, steps) if steps else start
    return found


@torch.no_grad()
def _calls(subject: Subject, layer: int) -> list[AttentionCall]:
    """Return the calls of one layer on all samples."""
    found = []

    def keep(index: int, call: AttentionCall) -> AttentionCall:
        if index == layer:
            found.append(replace(call, need_weights=True, prob_mixing=None))
        return call

    with subject.hooked(keep):
        for index in range(len(subject.samples)):
            subject.evaluate(index)
    return found


def _divergence(call: AttentionCall, maps: Maps) -> Tensor:
    """Return the mean KL divergence, in nats, of a row of mapped patterns from one of the call."""
    q, k = call.dot_product.q, call.dot_product.k
    scores = DotProduct(q @ maps.queries.to(q), k @ maps.keys.to(k), call.dot_product.factor)
    wanted, found = attention(call)[1], attention(replace(call, scores=scores))[1]
    assert wanted is not None and found is not None  # the call needs weights
    wanted, found = wanted.detach().float(), found.float()
    tiny = torch.finfo(found.dtype).tiny
    return (wanted * (wanted.clamp_min(tiny) / found.clamp_min(tiny)).log()).sum(-1).mean()


@torch.no_grad()
def divergence(calls: Sequence[AttentionCall], maps: Maps) -> float:
    """Return the mean over calls of the KL divergence, in nats, of a row of mapped patterns from one of the call."""
    return sum(_divergence(call, maps).item() for call in calls) / len(calls)


def fitted(calls: Sequence[AttentionCall], start: Maps, steps: int) -> Maps:
    """Return maps with a smaller :func:`divergence`, by Adam with one call a step; those of the start if there are none."""
    maps = Maps(*(part.float().requires_grad_() for part in start))
    sizes = [RATE * part.detach().square().mean().sqrt().item() for part in maps]
    optimizer = torch.optim.Adam([{"params": [part], "lr": size} for part, size in zip(maps, sizes, strict=True)])
    with torch.enable_grad():
        for step in range(steps):
            for group, size in zip(optimizer.param_groups, sizes, strict=True):
                group["lr"] = size * min(1, (step + 1) / WARMUP) * (1 - step / steps)
            optimizer.zero_grad()
            _divergence(calls[step % len(calls)], maps).backward()
            optimizer.step()
    after = Maps(*(part.detach().double() for part in maps))
    return min(start, after, key=lambda one: divergence(calls, one))


def check_narrow(layer: MultiheadAttention, rank: int) -> None:
    """Check that maps of queries and keys can be multiplied into a layer's weights.

    Raises:
        UserError: they cannot.
    """
    reason = ""
    if layer.config.rotary is not None:
        reason = "rotary positions turn queries and keys after their projections, and no map goes through a rotation"
    elif not layer.spec.is_default("projection", "score"):
        reason = f"projection {layer.spec.projection!r} with score {layer.spec.score!r} has no weights for them"
    elif layer.config.qk_norm or layer.bias_k is not None:
        reason = "queries and keys are normalised, or keys are appended"
    elif not layer.spec.is_default("score_mixing", "head_map"):
        reason = "heads mix their scores, queries or keys"
    elif layer.mixing is not None and getattr(layer.mixing, "reads_queries", False):
        reason = f"mixing {layer.spec.mixing!r} reads the queries"
    elif rank > layer.head_dim:
        reason = f"its heads have {layer.head_dim} numbers"
    if reason:
        raise FlagError("--head-dim", rank, f"queries and keys cannot be narrowed: {reason}", "Keep the head size.")


@torch.no_grad()
def narrow(layer: MultiheadAttention, maps: Maps) -> MultiheadAttention:
    """Return a layer whose heads compare (q A)·(k C), with the values of ``layer``.

    Queries also get the factor √(r/d_k), because the new layer divides scores by √r.

    Raises:
        UserError: the layer's weights cannot take maps.
    """
    rank = maps.keys.size(-1)
    check_narrow(layer, rank)
    result = with_choices(layer, head_dim=rank, value_dim=layer.config.value_dim)
    scale = (rank / layer.head_dim) ** 0.5
    for name, part, factor in (("q_proj", maps.queries, scale), ("k_proj", maps.keys, 1.0)):
        old, new = getattr(layer, name), getattr(result, name)
        part = (factor * part.double().mT).to(old.weight.device)
        weight = old.weight.double().unflatten(0, (len(part), -1))
        new.weight.copy_((part @ weight).flatten(0, 1))
        if old.bias is not None:
            new.bias.copy_((part @ old.bias.double().unflatten(0, (len(part), -1, 1))).flatten())
    return result


def narrow_heads(
    layer: MultiheadAttention, head_dim: int, samples: Sequence[Mapping[str, Any]] = (), *, steps: int = STEPS
) -> MultiheadAttention:
    """Return a layer with queries and keys of ``head_dim`` numbers, and values as they were: a smaller cache and fewer weights.

    Its outputs differ, so train further. Source of the idea: Thin Keys (arXiv 2603.04427).

    Args:
        layer: the trained layer.
        head_dim: the new size r.
        samples: arguments of the layer for some batches without padding, such as ``{"query": x, "key": x, "value": x,
            "attn_mask": CAUSAL}``. Without them the maps follow from the weights alone.
        steps: of the local fit; 0 for none.

    Raises:
        UserError: rotary positions, or other parts through which no map goes.
    """
    if not samples:
        return narrow(layer, maps_of_weights(layer, head_dim))
    check_narrow(layer, head_dim)

    def run(sample: Mapping[str, Any]) -> tuple[float, float]:
        layer(**sample)
        return 0.0, 1.0

    subject = LayerSubject("layer", [("layer", "encoder", 0, layer)], list(samples), run, Metric("none", True), 0)
    training = layer.training
    layer.eval()  # dropout would change the patterns
    try:
        return narrow(layer, maps_of_data(subject, head_dim, steps=steps)["layer"]).train(training)
    finally:
        layer.train(training)
