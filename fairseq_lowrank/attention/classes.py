"""What each method can add to plain multi-head attention of the same heads and head size, and the plain layer where it adds nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from fairseq_lowrank.attention.layer import MultiheadAttention
from fairseq_lowrank.attention.spec import AttentionSpec
from fairseq_lowrank.messages import UserError

Weights = tuple[Tensor, Tensor | None]
Plain = tuple[Weights, Weights, Weights]
"""A projection ``[heads * size, inputs]`` and its bias; a plain layer has one of queries, keys and values."""


@torch.no_grad()
def plain_attention(layer: MultiheadAttention) -> MultiheadAttention:
    """Return a layer of plain ``mha`` with the outputs of a restricted or equal layer.

    Raises:
        UserError: the layer computes more than plain attention of its head size.
    """
    spec, dims = layer.spec, layer.projection.dims
    if layer.config.qk_norm or layer.rotary is not None:
        raise UserError("qk_norm or rotary: plain attention has neither. Keep the layer as it is.")
    allowed = {"mixing": ("none", "diagonal"), "score_mixing": ("none",), "head_output": ("none",)}
    for axis, choices in allowed.items():
        if getattr(spec, axis) not in choices:
            raise UserError(
                f"{axis}={getattr(spec, axis)!r}: no plain attention computes this. Keep the layer as it is."
            )
    if spec.projection not in _PLAIN:
        raise UserError(f"projection={spec.projection!r}: no plain attention computes this. Keep the layer as it is.")
    if spec.score != "dot-product" or layer.bias_k is not None or layer.add_zero_attn:
        raise UserError(
            f"score={spec.score!r} or appended keys: the plain layer is written for dot products without appended keys"
        )
    queries, keys, values = _PLAIN[spec.projection](layer)
    if layer.head_map is not None:
        queries, keys, values = _mapped(layer, queries, keys, values)
    if layer.mixing is not None:
        factors = layer.mixing.weight.repeat_interleave(dims.value_dim)
        values = (values[0] * factors[:, None], None if values[1] is None else values[1] * factors)
    head_dim = queries[0].size(0) // layer.num_heads
    scale = (head_dim / layer.head_dim) ** 0.5  # the plain layer divides by the root of its own head size
    queries = (queries[0] * scale, None if queries[1] is None else queries[1] * scale)
    plain = AttentionSpec(head_dim=head_dim, value_dim=dims.value_dim, activation=spec.activation)
    biased = [layer.out_proj.bias, *(bias for _, bias in (queries, keys, values))]
    config = replace(layer.config, spec=plain, bias=any(bias is not None for bias in biased))
    result = MultiheadAttention(config, dropout=layer.dropout_module).to(queries[0].device, queries[0].dtype)
    out = layer.out_proj.weight, layer.out_proj.bias
    projections = (result.q_proj, result.k_proj, result.v_proj, result.out_proj)
    for projection, (weight, bias) in zip(projections, (queries, keys, values, out), strict=True):
        projection.weight.copy_(weight)
        if projection.bias is not None:
            projection.bias.copy_(torch.zeros(len(weight)) if bias is None else bias)
    return result.train(layer.training)


def _own(projection: Any, copies: int = 1) -> Weights:
    """Return a projection's weight and bias, for ``copies`` heads in a row that share it."""
    bias = projection.bias
    return projection.weight.repeat(copies, 1), None if bias is None else bias.repeat(copies)


def _grouped(layer: Any) -> Plain:
    """Return queries, keys and values of every head, copied where heads share them."""
    dims = layer.projection.dims
    size = {"q_proj": dims.head_dim, "k_proj": dims.head_dim, "v_proj": dims.value_dim}

    def expand(name: str) -> Weights:
        weight, bias = _own(getattr(layer, name))
        heads = weight.view(-1, size[name], weight.size(1))
        copies = layer.num_heads // len(heads)
        weight = heads.repeat_interleave(copies, dim=0).flatten(0, 1)
        return weight, None if bias is None else bias.view(-1, size[name]).repeat_interleave(copies, dim=0).flatten()

    return expand("q_proj"), expand("k_proj"), expand("v_proj")


def _shared_key_value(layer: Any) -> Plain:
    keys = _own(layer.k_proj)
    return _own(layer.q_proj), keys, keys


def _el(layer: Any) -> Plain:
    states = torch.eye(layer.embed_dim).to(layer.q_proj.weight), None
    return _own(layer.q_proj), states, states


def _embedded(combine: Callable[[Tensor, Tensor], Tensor], weigh: bool) -> Callable:
    def plain(layer: Any) -> Plain:
        result = []
        for name in ("query", "key", "value"):
            projection, embedding = getattr(layer, f"{name[0]}_proj"), getattr(layer.head_embeddings, name)
            weight, bias = _own(projection, layer.num_heads)
            bias = torch.zeros(len(weight)).to(weight) if bias is None else bias
            if weigh:
                weight = weight * (1 + embedding.flatten())[:, None]
            result.append((weight, combine(bias, embedding.flatten())))
        return cast(Plain, tuple(result))

    return plain


def _latent(layer: Any) -> Plain:
    if not isinstance(layer.latent_norm, nn.Identity):
        raise UserError(
            "projection='latent': its norm depends on the input, so no plain attention computes this. Keep the layer as it is."
        )
    down = layer.latent_proj.weight
    return _own(layer.q_proj), (layer.k_proj.weight @ down, None), (layer.v_proj.weight @ down, None)


def _low_rank(layer: Any) -> Plain:
    def full_weight(name: str) -> Weights:
        weight, bias = _own(getattr(layer, f"{name[0]}_proj"), layer.num_heads)
        down = getattr(layer, f"{name[0]}_factor_proj").weight.unflatten(0, (layer.num_heads, -1))
        return weight + (getattr(layer, f"{name}_factors").mT @ down).flatten(0, 1), bias

    return _own(layer.q_proj), full_weight("key"), full_weight("value")


def _collaborative(layer: Any) -> Plain:
    weight, bias = _own(layer.q_proj, layer.num_heads)
    features = layer.head_features.flatten()
    queries = weight * features[:, None], None if bias is None else bias * features
    return queries, _own(layer.k_proj, layer.num_heads), _own(layer.v_proj)


def _factorized(layer: Any) -> Plain:
    queries = layer.q_proj.weight @ layer.q_latent_proj.weight, layer.q_proj.bias
    return queries, _own(layer.k_proj, layer.num_heads), _own(layer.v_proj, layer.num_heads)


_PLAIN: dict[str, Callable[[MultiheadAttention], Plain]] = {
    "independent": _grouped,
    "single": _grouped,
    "multi-query": _grouped,
    "shared-kv": _shared_key_value,
    "el": _el,
    "head-embedding-add": _embedded(lambda bias, embedding: bias + embedding, weigh=False),
    "head-embedding-mul": _embedded(lambda bias, embedding: bias * (1 + embedding), weigh=True),
    "latent": _latent,
    "low-rank-kv": _low_rank,
    "collaborative": _collaborative,
    "factorized-query": _factorized,
}


def _mapped(layer: Any, *projections: Weights) -> Plain:
    """Fold a map of features or heads into the projections."""
    result = []
    for name, (weight, bias) in zip(("query", "key", "value"), projections, strict=True):
        matrix = getattr(layer.head_map, name, None)
        if matrix is None:
            result.append((weight, bias))
            continue
        joint = weight if bias is None else torch.cat([weight, bias[:, None]], dim=1)
        heads = joint.unflatten(0, (layer.num_heads, -1))
        equation = "de,hdx->hex" if layer.spec.head_map == "features" else "ji,jdx->idx"
        joint = torch.einsum(equation, matrix, heads).flatten(0, 1)
        result.append((joint, None) if bias is None else (joint[:, :-1], joint[:, -1]))
    return cast(Plain, tuple(result))
