"""Conversion of attention layers between plain attention and its factorisations."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from fairseq_lowrank.attention import MultiheadAttention
from fairseq_lowrank.attention.classes import plain_attention
from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.parts import PARTS
from fairseq_lowrank.parts.plain import copy_weights


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


def full_rank(layer: MultiheadAttention, projection: str) -> int:
    """Return the least size of a projection's factors at which plain attention loses nothing, apart from a norm."""
    return PARTS["projection"][projection].full_size(layer.projection.dims)


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
    sizes = [(each.projection.dims.head_dim, each.projection.dims.value_dim) for each in (plain, target)]
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


@torch.no_grad()
def relative_error(first: MultiheadAttention, second: MultiheadAttention) -> float:
    """Return ‖second − first‖ / ‖first‖ of the outputs of two layers on normal inputs of 4 sequences of 32 positions, or fewer."""
    length = min(32, first.config.max_positions or 32)
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(length, 4, size, generator=generator, dtype=torch.double) for size in (first.embed_dim, first.kdim)
    )
    y = x if first.self_attention else y
    before, after = (layer(x, y, y, need_weights=False)[0] for layer in (first, second))
    difference = (after - before).norm()
    return float(difference / before.norm()) if difference else 0.0  # outputs may be 0
