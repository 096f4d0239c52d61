"""What each method can add to plain multi-head attention of the same heads and head size, and the plain layer where it adds nothing."""

from __future__ import annotations

from dataclasses import replace

import torch

from fairseq_lowrank.attention.layer import MultiheadAttention
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import AXES, PARTS, AttentionSpec, parts_of
from fairseq_lowrank.parts.plain import Inexact, NotPlain
from fairseq_lowrank.parts.projection import is_plain_linear
from fairseq_lowrank.parts.stages import declared


@torch.no_grad()
def plain_attention(layer: MultiheadAttention) -> MultiheadAttention:
    """Return a layer of plain ``mha`` with the outputs of a restricted or equal layer.

    Raises:
        UserError: the layer computes more than plain attention of its head size.
    """
    check_foldable(layer)
    for axis, part in parts_of(layer).items():
        if not declared(part).folds:
            raise NotPlain(axis, getattr(layer.spec, axis))
    for axis in ("head_map", "mixing", "head_output"):
        layer = without_part(layer, axis)
    # Only a plain layer is sure to have a separate query for each head.
    return without_part(with_plain_projection(layer), "score_mixing")


def check_foldable(layer: MultiheadAttention) -> None:
    """Check that the weights of the projections are all that they compute.

    Raises:
        UserError: they are not.
    """
    for name, module in layer.named_modules():
        if name.endswith("_proj") and not is_plain_linear(module):
            raise UserError(
                f"{name} is a {type(module).__name__}, or has hooks, so its weight is not all that it computes. "
                "Merge adapters and remove hooks first."
            )


@torch.no_grad()
def without_part(layer: MultiheadAttention, axis: str) -> MultiheadAttention:
    """Return a layer with the same outputs and without the part of an axis, which is folded into the projections.

    Raises:
        NotPlain: the projections cannot hold the part.
    """
    part = getattr(layer, axis)
    if part is None:
        return layer
    result = with_choices(layer, **{axis: None})
    try:
        declared(part).fold(result)
    except Inexact as error:
        raise NotPlain(axis, getattr(layer.spec, axis), error.reason) from error
    return result


@torch.no_grad()
def with_plain_projection(layer: MultiheadAttention) -> MultiheadAttention:
    """Return a layer of independent projections and dot products with the same outputs and parts.

    Raises:
        UserError: the projection or the scores compute more.
    """
    if layer.config.qk_norm or layer.rotary is not None:
        raise UserError("qk_norm or rotary: plain attention has neither. Keep the layer as it is.")
    queries, keys, values = layer.projection.plain(layer)
    if layer.spec.score != AXES["score"].default or layer.bias_k is not None or layer.add_zero_attn:
        raise UserError(
            f"score={layer.spec.score!r} or appended keys: the plain layer is written for dot products without appended keys. "
            "Keep the layer as it is."
        )
    head_dim = queries[0].size(0) // layer.num_heads
    scale = (head_dim / layer.head_dim) ** 0.5  # the plain layer divides by the root of its own head size
    queries = (queries[0] * scale, None if queries[1] is None else queries[1] * scale)
    biased = [layer.out_proj.bias, *(bias for _, bias in (queries, keys, values))]
    sizes = {"head_dim": head_dim, "value_dim": layer.config.value_dim, "key_value_heads": None}
    result = with_choices(layer, bias=any(bias is not None for bias in biased), projection=None, **sizes)
    out = layer.out_proj.weight, layer.out_proj.bias
    projections = (result.q_proj, result.k_proj, result.v_proj, result.out_proj)
    for projection, (weight, bias) in zip(projections, (queries, keys, values, out), strict=True):
        projection.weight.copy_(weight)
        if projection.bias is not None:
            projection.bias.copy_(torch.zeros(len(weight)) if bias is None else bias)
    return result


@torch.no_grad()
def with_choices(
    layer: MultiheadAttention, *, bias: bool | None = None, **choices: int | str | None
) -> MultiheadAttention:
    """Return a layer with other choices on some axes, and the tensors of ``layer`` that fit it. Other tensors have initial values.

    Args:
        layer: the layer.
        bias: whether projections add a bias, by default like ``layer``.
        choices: by axis; ``None`` is the default. Options that no chosen part reads are dropped.
    """
    bias = layer.config.bias if bias is None else bias
    config = replace(layer.config, spec=_with_choices(layer.spec, **choices), bias=bias, rotary=layer.rotary)
    like = layer.out_proj.weight
    with like.device:
        result = MultiheadAttention(config, dropout=layer.dropout_module).to(like.dtype)
    tensors = layer.state_dict()
    for name, tensor in result.state_dict(keep_vars=True).items():
        if name in tensors and tensors[name].shape == tensor.shape:
            tensor.copy_(tensors[name])
    return result.train(layer.training)


def _with_choices(spec: AttentionSpec, **choices: int | str | None) -> AttentionSpec:
    values = spec.choices | choices
    chosen = {axis: values.get(axis) or AXES[axis].default for axis in PARTS}
    read = {
        name: value
        for name, value in values.items()
        if not AXES[name].readers or any(chosen[axis] == part for axis, part in AXES[name].readers)
    }
    return AttentionSpec(**read)
