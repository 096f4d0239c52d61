"""Conversion of attention layers between plain attention and its factorisations."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from fairseq_lowrank.attention import MultiheadAttention
from fairseq_lowrank.attention.classes import plain_attention
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.ops.activation import ACTIVATIONS


def layer_with(module: MultiheadAttention, tensors: dict[str, Tensor]) -> MultiheadAttention:
    """Return a copy of a layer on the meta device in float64 with these tensors."""
    layer = copy.deepcopy(module).to_empty(device="cpu").double().eval()
    layer.load_state_dict(tensors)
    return layer


def full_rank(layer: MultiheadAttention, projection: str) -> int:
    """Return the least size of :data:`FACTORED` at which plain attention loses nothing, apart from the norm of ``latent``."""
    dims = layer.projection.dims
    sizes = {
        "latent": min(dims.kdim, dims.num_heads * (dims.head_dim + dims.value_dim)),
        "collaborative": dims.num_heads * dims.head_dim,
        "low-rank-kv": max(dims.head_dim, dims.value_dim),
    }
    return sizes[projection]


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
        raise UserError(f"--head-dim {sizes[1][0]}: the checkpoint's heads have sizes {sizes[0]}. Give the same sizes.")
    result = copy.deepcopy(target).to_empty(device="cpu").double().eval()
    for parameter in result.parameters():
        parameter.zero_()
    _copy(plain.out_proj, result.out_proj)
    FACTORED[target.spec.projection][1](plain, result)
    return result


def _copy(source: torch.nn.Module, target: torch.nn.Module) -> None:
    target.weight.copy_(source.weight)
    if source.bias is not None:
        target.bias.copy_(source.bias)


def _fold_biases(plain: MultiheadAttention, result: MultiheadAttention) -> None:
    """Move biases of keys and values into the output, because factored projections have none.

    A key's bias adds the same to all scores of a row, which softmax cancels. A value's bias adds a constant to the output.
    """
    if plain.k_proj.bias is None:
        return
    if plain.k_proj.bias.any() and not ACTIVATIONS[plain.spec.activation].shift_invariant:
        raise UserError(
            f"--attention-activation {plain.spec.activation}: does not cancel the biases of keys, which this projection does not have. "
            "Use softmax, or a checkpoint without biases."
        )
    result.out_proj.bias.add_(plain.out_proj.weight @ plain.v_proj.bias)


def _latent(plain: MultiheadAttention, result: MultiheadAttention) -> None:
    """Set c = W_c y with orthonormal rows, so that the norm changes nothing where y has unit length a feature."""
    _copy(plain.q_proj, result.q_proj)
    _fold_biases(plain, result)
    joint = torch.cat([plain.k_proj.weight, plain.v_proj.weight])
    left, values, right = torch.linalg.svd(joint, full_matrices=False)
    rank = min(result.latent_proj.weight.size(0), len(values))
    up = left[:, :rank] * values[:rank]
    result.latent_proj.weight[:rank] = right[:rank]
    result.k_proj.weight[:, :rank], result.v_proj.weight[:, :rank] = up.split(
        [len(plain.k_proj.weight), len(plain.v_proj.weight)]
    )
    torch.nn.init.ones_(result.latent_norm.weight)


def _low_rank(plain: MultiheadAttention, result: MultiheadAttention) -> None:
    """Set the shared projection to the mean over heads, and factor the difference of each head."""
    _copy(plain.q_proj, result.q_proj)
    _fold_biases(plain, result)
    for name in ("key", "value"):
        heads = getattr(plain, f"{name[0]}_proj").weight.unflatten(0, (plain.num_heads, -1))
        shared = heads.mean(dim=0)
        getattr(result, f"{name[0]}_proj").weight.copy_(shared)
        left, values, right = torch.linalg.svd(heads - shared, full_matrices=False)
        factors = getattr(result, f"{name}_factors")
        rank, roots = min(factors.size(1), values.size(1)), values.sqrt()
        factors[:, :rank] = (left * roots[:, None])[:, :, :rank].mT
        down = getattr(result, f"{name[0]}_factor_proj").weight.unflatten(0, (plain.num_heads, -1))
        down[:, :rank] = (roots[:, :, None] * right)[:, :rank]


def _collaborative(plain: MultiheadAttention, result: MultiheadAttention) -> None:
    """Keep the D largest singular values of all heads' bilinear forms, each as a feature of its head."""
    _copy(plain.v_proj, result.v_proj)
    queries, keys = (_with_bias(projection, plain.num_heads) for projection in (plain.q_proj, plain.k_proj))
    (basis_q, small_q), (basis_k, small_k) = (torch.linalg.qr(weight.mT) for weight in (queries, keys))
    left, values, right = torch.linalg.svd(small_q @ small_k.mT)
    head = torch.arange(plain.num_heads)[:, None].expand_as(values).flatten()
    roots = values.sqrt()[:, :, None]
    query_rows = (roots * (basis_q @ left).mT).flatten(0, 1)
    key_rows = (roots * (right @ basis_k.mT)).flatten(0, 1)
    kept = values.flatten().argsort(descending=True)[: result.q_proj.weight.size(0)]
    for projection, rows in ((result.q_proj, query_rows[kept]), (result.k_proj, key_rows[kept])):
        projection.weight[: len(kept)] = rows[:, : projection.weight.size(1)]
        if projection.bias is not None:
            projection.bias[: len(kept)] = rows[:, -1]
    result.head_features[head[kept], torch.arange(len(kept))] = 1.0


def _with_bias(projection: torch.nn.Module, heads: int) -> Tensor:
    """Return ``[H, D, inputs (+ 1)]``, with the bias as the weight of an input that is 1."""
    weight = (
        projection.weight if projection.bias is None else torch.cat([projection.weight, projection.bias[:, None]], 1)
    )
    return weight.unflatten(0, (heads, -1))


FACTORED: dict[str, tuple[str, Callable[[MultiheadAttention, MultiheadAttention], None]]] = {
    "latent": ("latent_dim", _latent),
    "collaborative": ("shared_dim", _collaborative),
    "low-rank-kv": ("factor_rank", _low_rank),
}
"""The projections into which plain attention can be factored, each with the axis of its size and the factorisation."""


@torch.no_grad()
def relative_error(first: MultiheadAttention, second: MultiheadAttention) -> float:
    """Return ‖second − first‖ / ‖first‖ of the outputs of two layers on normal inputs of 4 sequences of 32 positions."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(32, 4, size, generator=generator, dtype=torch.double) for size in (first.embed_dim, first.kdim))
    y = x if first.self_attention else y
    before, after = (layer(x, y, y, need_weights=False)[0] for layer in (first, second))
    return float((after - before).norm() / before.norm())
