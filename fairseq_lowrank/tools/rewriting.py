"""Conversion of attention layers: other parts, sizes and projections with the same outputs, or with a known loss.

A conversion has two halves. :func:`reduced` removes what the new layer lacks, and needs only the new choices. :func:`expanded`
adds what the old layer lacks, and needs the new layer. In between the caller can choose sizes of the new layer.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_lowrank.attention import AXES, AttentionSpec, MultiheadAttention
from fairseq_lowrank.attention.classes import (
    check_foldable,
    plain_attention,
    with_choices,
    with_plain_projection,
    without_part,
)
from fairseq_lowrank.messages import FlagError, UserError, flag_name
from fairseq_lowrank.parts import MODULE_AXES, PARTS
from fairseq_lowrank.parts.plain import Inexact, NotPlain, copy_weights
from fairseq_lowrank.parts.stages import declared

NEGLIGIBLE = 1e-12
"""The relative error of outputs in float64 that rounding alone can cause."""


def layer_with(module: MultiheadAttention, tensors: dict[str, Tensor]) -> MultiheadAttention:
    """Return a copy of a layer on the meta device in float64 with these tensors.

    Raises:
        UserError: the tensors are not those of the layer.
    """
    layer = copy.deepcopy(module).to_empty(device="cpu").double().eval()
    for part in layer.modules():  # fairseq's quantisation noise is a hook that acts in training only
        part._forward_pre_hooks.clear()
    try:
        layer.load_state_dict(tensors)
    except RuntimeError as error:  # names and shapes, one a line
        found = " ".join(str(error).split())
        raise UserError(f"the layer's tensors cannot be loaded ({found}). Keep the checkpoint as it is.") from error
    return layer


def reduced(layer: MultiheadAttention, target: AttentionSpec) -> MultiheadAttention:
    """Return a layer with the same outputs, whose projection and parts are those of ``target`` or the default of their axis.

    Args:
        layer: the layer, in float64.
        target: the choices of the new layer.

    Raises:
        UserError: the outputs would change.
    """
    if layer.spec == target:
        return layer
    check_foldable(layer)
    for axis in ("score", "activation"):
        if (old := getattr(layer.spec, axis)) != (new := getattr(target, axis)):
            raise UserError(f"{axis} {old!r} cannot become {new!r} with the same outputs. Keep the {axis}.")
    for axis in MODULE_AXES:
        if axis != "score_mixing":
            layer = _with_part(layer, axis, target)
    if _choice(layer.spec, "projection") != _choice(target, "projection"):
        layer = with_plain_projection(layer)
    # Only a plain layer is sure to have a separate query for each head, into which scores can be folded.
    return _with_part(layer, "score_mixing", target)


def expanded(layer: MultiheadAttention, target: MultiheadAttention) -> tuple[MultiheadAttention, str]:
    """Return a layer with the choices and sizes of ``target`` and, if possible, the outputs of ``layer``.

    Args:
        layer: from :func:`reduced`.
        target: the new layer; it may be on the meta device.

    Returns:
        The layer, and why its outputs may differ. The reason is empty if they may not.

    Raises:
        UserError: the outputs would change.
    """
    spec, config, loss = target.spec, target.config, ""
    factored = _choice(layer.spec, "projection") != _choice(spec, "projection")
    groups = layer.projection.state_heads if factored else target.projection.state_heads
    if (config.head_dim, config.value_dim, groups) != _sizes(layer):
        layer, loss = resized(layer, config.head_dim, config.value_dim, groups)
    if factored:
        part = PARTS["projection"][spec.projection]
        if part.factor is None:
            names = [name for name, part in PARTS["projection"].items() if part.factor is not None]
            raise UserError(
                f"projection {spec.projection!r}: weights of plain attention cannot be written in this form. Convert to "
                f"projection {', '.join(names)}, or keep the projection."
            )
        layer = factorize(layer, with_choices(target, **dict.fromkeys(MODULE_AXES)))
        loss = part.factor_loss or "the rank is too small for these weights"
    for axis in MODULE_AXES:
        name = getattr(spec, axis)
        if getattr(layer, axis) is None and name != AXES[axis].default:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                layer = with_choices(layer, **_of_axis(spec, axis))
            part = declared(getattr(layer, axis))
            if not (part.learns and part.keeps_stock):
                reason = "has an initial value that changes outputs" if part.learns else "is fixed"
                raise UserError(
                    f"{axis} {name!r} {reason}, so it cannot continue plain attention with the same outputs. Choose another "
                    f"{axis}, or train from scratch."
                )
    return layer, loss


def _with_part(layer: MultiheadAttention, axis: str, target: AttentionSpec) -> MultiheadAttention:
    """Return a layer with the part of ``target`` on an axis, or with none, and the same outputs.

    Raises:
        UserError: the outputs would change.
    """
    part, old, new = getattr(layer, axis), getattr(layer.spec, axis), getattr(target, axis)
    if part is None or _choice(layer.spec, axis) == _choice(target, axis):
        return layer
    reason = None
    if new != AXES[axis].default:
        result = with_choices(layer, **_of_axis(target, axis))
        try:
            declared(getattr(result, axis)).take_over(declared(part))
            return result
        except Inexact as error:
            reason = error.reason
    result = with_choices(layer, **{axis: None})
    if relative_error(layer, result) < NEGLIGIBLE:  # the part is the identity
        return result
    try:
        return without_part(layer, axis)
    except NotPlain as error:
        if reason is None:
            raise
        raise UserError(f"{axis} {old!r} cannot become {new!r}: {reason}. Keep the {axis}.") from error


def _of_axis(spec: AttentionSpec, axis: str) -> dict[str, Any]:
    """Return the choice on an axis, and the options of its part."""
    return {axis: getattr(spec, axis)} | spec.options_of(PARTS[axis][getattr(spec, axis)])


def _choice(spec: AttentionSpec, axis: str) -> dict[str, int | str | None]:
    return {axis: None} if PARTS[axis][getattr(spec, axis)] is None else _of_axis(spec, axis)


def _sizes(layer: MultiheadAttention) -> tuple[int, int, int]:
    config = layer.config
    return config.head_dim, config.value_dim, layer.projection.state_heads


@torch.no_grad()
def resized(layer: MultiheadAttention, head_dim: int, value_dim: int, groups: int) -> tuple[MultiheadAttention, str]:
    """Return a layer of standard attention with other sizes, and why its outputs may differ.

    Larger heads are exact. Queries get rows of 0 and are scaled by √(d_p / d_k), because the layer divides scores by √d_p
    instead of √d_k. Keys get random rows with the standard deviation of the others, so that the new part of the queries can
    learn. Values get such rows too, and the output projection gets columns of 0.

    More heads of keys and values are exact: each old head is repeated. Fewer are means of neighbours (Ainslie et al. 2023,
    section 2.1), which changes the outputs.

    Args:
        layer: the layer, in float64.
        head_dim, value_dim: the new sizes of heads.
        groups: the new number of heads of keys and values.

    Raises:
        UserError: the sizes cannot be changed in this way.
    """
    for axis in ("projection", "score", "head_map", "head_output"):
        if (choice := getattr(layer.spec, axis)) != AXES[axis].default:
            raise UserError(
                f"{axis.replace('_', ' ')} {choice}: sizes of these heads cannot be converted. Keep the sizes."
            )
    if layer.bias_k is not None or layer.config.qk_norm:
        raise UserError(
            "appended keys or normalised queries: sizes of these heads cannot be converted. Keep the sizes."
        )
    old_head_dim, old_value_dim, old_groups = _sizes(layer)
    for name, size, old in (("head_dim", head_dim, old_head_dim), ("value_dim", value_dim, old_value_dim)):
        if size < old:
            reason = f"smaller than the checkpoint's {old}, so outputs would change"
            raise FlagError(flag_name(name), size, reason, f"Use {old} or more.")
    if groups % old_groups and old_groups % groups:
        reason = f"neither a divisor nor a multiple of the checkpoint's {old_groups}"
        raise FlagError("--key-value-heads", groups, reason, "Use one of these.")

    def grouped(tensor: Tensor) -> Tensor:
        if groups >= old_groups:
            return tensor.repeat_interleave(groups // old_groups, 0)
        return tensor.unflatten(0, (groups, -1)).mean(1)

    generator = torch.Generator().manual_seed(1)

    def padded(tensor: Tensor, size: int, *, drawn: bool = False) -> Tensor:
        """Extend dimension 1 to a size, by random numbers with the tensor's standard deviation or by 0."""
        missing = size - tensor.size(1)
        if not missing:
            return tensor
        rest = tensor.new_zeros(len(tensor), missing, *tensor.shape[2:])
        if drawn:
            rest = torch.randn(rest.shape, generator=generator, dtype=tensor.dtype) * tensor.std()
        return torch.cat((tensor, rest), 1)

    result = with_choices(layer, head_dim=head_dim, value_dim=value_dim, key_value_heads=groups)
    scale = (head_dim / old_head_dim) ** 0.5
    for name, number, size in (
        ("q_proj", layer.num_heads, head_dim),
        ("k_proj", old_groups, head_dim),
        ("v_proj", old_groups, value_dim),
    ):
        for part in ("weight", "bias"):
            if (tensor := getattr(getattr(layer, name), part)) is None:
                continue
            values = tensor.unflatten(0, (number, -1))
            values = values * scale if name == "q_proj" else grouped(values)
            values = padded(values, size, drawn=part == "weight" and name != "q_proj")
            getattr(getattr(result, name), part).copy_(values.flatten(0, 1))
    weight = layer.out_proj.weight.unflatten(1, (layer.num_heads, -1))
    result.out_proj.weight.copy_(F.pad(weight, (0, value_dim - old_value_dim)).flatten(1))
    for axis in ("score_mixing", "mixing"):  # they may read the queries before the scale
        if (query_weight := getattr(getattr(layer, axis), "query_weight", None)) is not None:
            new = F.pad(query_weight / scale, (0, 0, 0, head_dim - old_head_dim))
            getattr(result, axis).query_weight.copy_(new)
    loss = "" if groups >= old_groups else "keys and values are means of the heads that now share them"
    return result, loss


def full_rank(layer: MultiheadAttention, projection: str) -> int:
    """Return the least size of a projection's factors at which plain attention loses nothing, apart from a norm."""
    return PARTS["projection"][projection].full_size(layer.config)


@torch.no_grad()
def factorize(layer: MultiheadAttention, target: MultiheadAttention) -> MultiheadAttention:
    """Return a layer like ``target``, a factorisation of a restricted or equal layer by truncated singular values.

    Args:
        layer: the layer, in float64.
        target: a layer with the new projection and its sizes; it may be on the meta device.

    Raises:
        UserError: the layer computes more than plain attention, or the head sizes differ.
    """
    plain = plain_attention(layer)
    sizes = [(each.config.head_dim, each.config.value_dim) for each in (plain, target)]
    if sizes[0] != sizes[1]:
        raise FlagError(
            "--head-dim", sizes[1][0], f"the checkpoint's heads have sizes {sizes[0]}", "Give the same sizes."
        )
    biased = [
        module.bias for module in (plain.q_proj, plain.k_proj, plain.v_proj, plain.out_proj) if module.bias is not None
    ]
    if target.out_proj.bias is None and any(bool(bias.any()) for bias in biased):
        reason = "the new layer has no biases, and the old one's are not 0"
        raise FlagError("--no-attention-bias", "", reason, "Build the new layer with biases.")
    result = copy.deepcopy(target).to_empty(device="cpu").double().eval()
    for parameter in result.parameters():
        parameter.zero_()
    copy_weights(plain.out_proj, result.out_proj)
    result.projection.factorize(plain, result)
    return result


def relative_error(first: MultiheadAttention, second: MultiheadAttention) -> float:
    """Return ‖second − first‖ / ‖first‖ of the outputs of two layers on normal inputs of 4 sequences of 32 positions, or fewer."""
    return relative_errors(first, second)[0]


@torch.no_grad()
def relative_errors(first: MultiheadAttention, second: MultiheadAttention) -> tuple[float, float]:
    """Return the same as :func:`relative_error` for the outputs, and for the weights of all heads."""
    length = min(32, first.config.max_positions or 32)
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(length, 4, size, generator=generator, dtype=torch.double) for size in (first.embed_dim, first.kdim)
    )
    y = x if first.self_attention else y
    pairs = zip(*(layer(x, y, y, need_head_weights=True) for layer in (first, second)), strict=True)
    output_error, weight_error = (
        float((after - before).norm() / before.norm()) if not torch.equal(after, before) else 0.0  # outputs may be 0
        for before, after in pairs
    )
    return output_error, weight_error
