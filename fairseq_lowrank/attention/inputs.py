"""Which tensors a layer can take, and their layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from fairseq_lowrank.attention.layer import MultiheadAttention


def check_tensors(layer: MultiheadAttention, query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
    """Refuse what no layer of these sizes can take."""
    parts = (("query", query, "embed_dim"), ("key", key, "kdim"), ("value", value, "vdim"))
    for name, tensor, size in parts:
        if tensor is None:
            continue
        if tensor.is_nested:
            raise ValueError(f"{name} is a nested tensor: expected a padded one, with key_padding_mask")
        if tensor.dim() != 3:
            layout = "[batch, time, {}]" if layer.batch_first else "[time, batch, {}]"
            shape = layout.format(getattr(layer, size))
            raise ValueError(f"{name} of shape {list(tensor.shape)}: expected {shape}")
        if tensor.size(2) != getattr(layer, size):
            expected = getattr(layer, size)
            raise ValueError(f"{name} of size {tensor.size(2)}: this layer was built with {size}={expected}")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} of {tensor.dtype}: expected a float tensor")


def check_layout(
    layer: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: object,
) -> None:
    """Refuse tensors of the other layout where masks, or the sizes of the batch, give them away."""
    (queries, batch, _), (keys, key_batch, _) = query.shape, key.shape
    padding = None if key_padding_mask is None else tuple(key_padding_mask.shape)
    mask = tuple(attn_mask.shape[-2:]) if isinstance(attn_mask, Tensor) else None
    fits = padding in (None, (key_batch, keys)) and mask in (None, (queries, keys))
    if fits and (batch == key_batch or layer.beam_size > 1):
        return
    # With time and batch exchanged everything has to fit.
    if queries == keys and padding in (None, (keys, key_batch)) and mask in (None, (batch, key_batch)):
        layout = "time first" if layer.batch_first else "batch first"
        given = [
            f"{name} {list(shape)}" for name, shape in (("key_padding_mask", padding), ("attn_mask", mask)) if shape
        ]
        raise ValueError(
            f"query {list(query.shape)} and key {list(key.shape)}, read as [time, batch, size], do not fit "
            f"{' and '.join(given) or 'each other'}, but {layout} they do: build the layer with "
            f"batch_first={not layer.batch_first}, or transpose them"
        )


def transposed(query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """With their first two dimensions exchanged; what is one tensor stays one."""
    swapped_query = query.transpose(0, 1)
    swapped_key = swapped_query if key is query else None if key is None else key.transpose(0, 1)
    swapped_value = swapped_key if value is key else None if value is None else value.transpose(0, 1)
    return swapped_query, swapped_key, swapped_value
