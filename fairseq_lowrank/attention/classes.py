"""What each method can add to plain multi-head attention of the same heads and head size, and the plain layer where it adds nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from fairseq_lowrank.attention.layer import MultiheadAttention
from fairseq_lowrank.attention.spec import AttentionSpec
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import HeadMap, Mixing, parts_of
from fairseq_lowrank.parts.plain import NotPlain, Plain, Weights
from fairseq_lowrank.parts.projection import is_plain_linear


@torch.no_grad()
def plain_attention(layer: MultiheadAttention) -> MultiheadAttention:
    """Return a layer of plain ``mha`` with the outputs of a restricted or equal layer.

    Raises:
        UserError: the layer computes more than plain attention of its head size.
    """
    spec, dims = layer.spec, layer.projection.dims
    for name, module in layer.named_modules():
        if name.endswith("_proj") and not is_plain_linear(module):
            raise UserError(
                f"{name} is a {type(module).__name__}, or has hooks, so its weight is not all that it computes. "
                "Merge adapters and remove hooks first."
            )
    if layer.config.qk_norm or layer.rotary is not None:
        raise UserError("qk_norm or rotary: plain attention has neither. Keep the layer as it is.")
    for axis, part in parts_of(layer).items():
        folds = isinstance(part, HeadMap) or (isinstance(part, Mixing) and part.factors() is not None)
        if not folds:
            raise NotPlain(axis, getattr(spec, axis))
    queries, keys, values = layer.projection.plain(layer)
    if spec.score != "dot-product" or layer.bias_k is not None or layer.add_zero_attn:
        raise UserError(
            f"score={spec.score!r} or appended keys: the plain layer is written for dot products without appended keys. "
            "Keep the layer as it is."
        )
    if layer.head_map is not None:
        queries, keys, values = _mapped(layer, queries, keys, values)
    if layer.score_mixing is not None and (of_heads := layer.score_mixing.factors()) is not None:
        factors = of_heads.repeat_interleave(len(queries[0]) // layer.num_heads)
        queries = (queries[0] * factors[:, None], None if queries[1] is None else queries[1] * factors)
    if layer.mixing is not None and (of_heads := layer.mixing.factors()) is not None:
        factors = of_heads.repeat_interleave(dims.value_dim)
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
        joint = torch.einsum(layer.head_map.equation(), matrix, heads).flatten(0, 1)
        result.append((joint, None) if bias is None else (joint[:, :-1], joint[:, -1]))
    return cast(Plain, tuple(result))
