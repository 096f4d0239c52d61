"""Checks of the tensors that a layer gets, and their layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_lowrank.parts import AttentionConfig


def check_tensors(config: AttentionConfig, query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
    """Check sizes and dtypes.

    Raises:
        ValueError: tensors that no layer of these sizes can take.
    """
    _check_tensor(config, query, "query", "embed_dim", config.embed_dim)
    if key is not None and not (key is query and config.kdim == config.embed_dim):
        _check_tensor(config, key, "key", "kdim", config.kdim)
    if value is not None and not (value is key and config.vdim == config.kdim):
        _check_tensor(config, value, "value", "vdim", config.vdim)
        if key is not None and value.shape[:2] != key.shape[:2]:
            raise ValueError(
                f"value of shape {list(value.shape)}: expected {[*key.shape[:2], config.vdim]}, because key has {list(key.shape)}"
            )


def _check_tensor(config: AttentionConfig, tensor: Tensor, name: str, size_name: str, size: int) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}: expected a tensor")
    if tensor.dim() == 3 and tensor.size(2) == size and tensor.is_floating_point() and not tensor.is_nested:
        return
    if tensor.is_nested:
        raise ValueError(f"{name} is a nested tensor: expected a padded one, with key_padding_mask")
    if tensor.dim() != 3:
        shape = f"[batch, time, {size}]" if config.batch_first else f"[time, batch, {size}]"
        raise ValueError(f"{name} of shape {list(tensor.shape)}: expected {shape}")
    if tensor.size(2) != size:
        raise ValueError(
            f"{name} of size {tensor.size(2)}: this layer was built with {size_name}={size}. Pass inputs of this size, or build "
            f"the layer with {size_name}={tensor.size(2)}."
        )
    raise ValueError(f"{name} of {tensor.dtype}: expected a float tensor")


def check_dtype(tensor: Tensor, name: str, projection: nn.Module | None) -> None:
    """Check that a projection can take a tensor: ``x.half()`` needs a layer in half precision, or autocast.

    Raises:
        ValueError: dtypes that torch does not multiply. Projections with hooks or of other classes may cast, and are left out.
    """
    if type(projection) is not nn.Linear or (weight := projection._parameters.get("weight")) is None:
        return
    if weight.dtype == tensor.dtype or type(weight) is not nn.Parameter or projection._forward_pre_hooks:
        return
    if not torch.is_autocast_enabled(tensor.device.type):
        raise ValueError(
            f"{name} of {tensor.dtype}: this layer has weights of {weight.dtype}. Pass {name}.to({weight.dtype}), or convert the layer "
            f"with layer.to({tensor.dtype})."
        )


def check_layout(
    config: AttentionConfig,
    query: Tensor,
    key: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: object,
    *,
    beams: bool = False,
) -> None:
    """Check for tensors of the other layout, as far as masks or batch sizes reveal them.

    Args:
        beams: several queries in a row may share the keys of one batch entry.

    Raises:
        ValueError: the tensors would fit with time and batch exchanged.
    """
    (queries, batch, _), (keys, key_batch, _) = query.shape, key.shape
    if key_padding_mask is None and attn_mask is None and batch == key_batch:
        return
    padding = None if key_padding_mask is None else tuple(key_padding_mask.shape)
    mask = tuple(attn_mask.shape[-2:]) if isinstance(attn_mask, Tensor) else None
    fits = padding in (None, (key_batch, keys)) and mask in (None, (queries, keys))
    if fits and (batch == key_batch or beams):
        return
    # With time and batch exchanged everything has to fit.
    if queries == keys and padding in (None, (keys, key_batch)) and mask in (None, (batch, key_batch)):
        layout = "time first" if config.batch_first else "batch first"
        given = [
            f"{name} {list(shape)}" for name, shape in (("key_padding_mask", padding), ("attn_mask", mask)) if shape
        ]
        raise ValueError(
            f"query {list(query.shape)} and key {list(key.shape)}, read as [time, batch, size], do not fit "
            f"{' and '.join(given) or 'each other'}, but {layout} they do: build the layer with "
            f"batch_first={not config.batch_first}, or transpose them"
        )


def transposed(query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Exchange the first two dimensions; one tensor that is given twice stays one tensor."""
    swapped_query = query.transpose(0, 1)
    swapped_key = swapped_query if key is query else None if key is None else key.transpose(0, 1)
    swapped_value = swapped_key if value is key else None if value is None else value.transpose(0, 1)
    return swapped_query, swapped_key, swapped_value
