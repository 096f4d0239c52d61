"""The attention function that models of ``transformers`` call, and what sees its calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from fairseq_lowrank.huggingface.added import added_to, parts_of, replace_fields
from fairseq_lowrank.huggingface.models import attention_modules
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.ops import AttentionCall, AttentionMask, DotProduct, attention

IMPLEMENTATION = "fairseq_lowrank"
"""The name of our function in ``config._attn_implementation``."""

# What models pass for other attention functions, or for other parts of the model; the mask function and the caches have
# used the rest of it already.
_USED_ELSEWHERE = frozenset(
    (
        *("position_ids", "sliding_window", "cache_position", "past_key_values", "use_cache", "return_dict"),
        *("output_hidden_states", "output_router_logits", "num_items_in_batch", "deterministic", "logits_to_keep"),
        *("token_type_ids", "position_embeddings", "layer_idx", "labels", "encoder_attention_mask"),
        *("encoder_hidden_states", "head_mask", "interpolate_pos_encoding"),
    )
)


def attention_weights(
    model: PreTrainedModel, receive: Callable[[nn.Module, str, int, Tensor], None]
) -> contextlib.AbstractContextManager[None]:
    """Call ``receive(module, site, layer, weights)`` with each layer's mixed weights ``[B, H, T, S]`` while the context is open.

    The model has its attention from :func:`apply_attention`.
    """
    return _watched(model, "receive", lambda index, *place: functools.partial(receive, *place))


def attention_calls(
    model: PreTrainedModel, change: Callable[[int, AttentionCall], AttentionCall]
) -> contextlib.AbstractContextManager[None]:
    """Compute ``change(index, call)`` in place of each layer's call while the context is open.

    The index counts :func:`attention_modules`. The model has its attention from :func:`apply_attention`.
    """
    return _watched(model, "change", lambda index, *place: functools.partial(change, index))


@contextlib.contextmanager
def _watched(model: nn.Module, field: str, function_of: Callable[..., Callable]) -> Iterator[None]:
    """Give each attention module a function while the context is open, in a field of its :class:`AddedAttention`."""
    places = attention_modules(model)
    for index, place in enumerate(places):
        replace_fields(place[0], **{field: function_of(index, *place)})
    try:
        yield
    finally:
        for module, _, _ in places:
            replace_fields(module, **{field: None})


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute one attention layer of a model of transformers; the function that is registered there.

    Args:
        query: ``[B, H, T, D]``, projected and rotated.
        key, value: ``[B, G, S, D]``; G divides H.
        attention_mask: ``[B, 1 or H, T, S]``: bool, True at visible keys; or float, added to the scores.
        position_bias: ``[1 or B, H, T, S]``, added to the (mixed) scores, as in T5.
        softcap: c in c·tanh(s / c), applied to the scores of each head before they are mixed, as in Gemma 2.
        s_aux: ``[H]`` one more score (a sink) in each row of the mixed scores, whose weight reads no value, as in gpt-oss.
        output_attentions: return the mixed weights too.

    Returns:
        ``[B, T, H, D]`` and the weights ``[B, H, T, S]`` or None.

    Raises:
        UserError: the model passes something that is not computed here.
    """
    if unknown := [name for name, given in others.items() if given is not None and name not in _USED_ELSEWHERE]:
        raise UserError(
            f"{type(module).__name__} passes {unknown[0]} to its attention, which is not computed here. "
            'Call apply_attention(model, "mha"), and then model.set_attn_implementation("sdpa"), to use it without mixing.'
        )
    added = added_to(module)
    stages, inputs = added.stages, added.inputs
    query_length, key_length = query.size(2), key.size(2)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and attention_mask is None and query_length > 1
    if causal and key_length > query_length:  # the first tokens in an empty static cache: later slots hold nothing yet
        key, value = key[:, :, :query_length], value[:, :, :query_length]
        position_bias = None if position_bias is None else position_bias[..., :query_length]
    hidden = attention_mask
    if hidden is not None and hidden.dtype == torch.bool:
        hidden = ~hidden
    given: dict[str, Any] = {"score_bias": position_bias, "score_cap": softcap, "sinks": s_aux}
    if twice := [name for name, value in given.items() if value is not None and name in stages.fields]:
        raise UserError(
            f"{type(module).__name__} sets {twice[0]} of its attention, and the chosen attention does too. "
            "Leave this layer out with layers= or sites=."
        )
    parts = parts_of(module)
    for part in parts.values():  # a part whose weights were moved by hooks may compute on another device
        if any(tensor.device != query.device for tensor in (*part.parameters(), *part.buffers())):
            part.to(query.device)
    if added.dims is not None and added.dims.num_heads != query.size(1):
        raise UserError(
            f"{type(module).__name__}: mixing of {added.dims.num_heads} heads, and the model passes {query.size(1)}. "
            "This layer repeats or splits its heads; leave it out with layers= or sites=."
        )
    fields = {**given, **added.settings}
    for axis, part in parts.items():
        if axis in stages.call:
            fields.update(part.call_fields(query, inputs))
    call = AttentionCall(
        DotProduct(query, key, scaling),
        value,
        AttentionMask(causal=causal, additive=hidden),
        dropout_p=dropout,
        need_weights=bool(output_attentions) or added.receive is not None,
        **fields,
    )
    if added.change is not None:
        call = added.change(call)
    heads, weights = attention(call)
    own = _own_values(value, query, attention_mask) if stages.read_own_values else None
    for axis, part in parts.items():
        if axis in stages.heads:
            heads = part(heads, inputs, own).to(query.dtype)
        if axis in stages.weights and weights is not None:
            weights = part.combine_weights(weights, inputs)
    if added.receive is not None and weights is not None:
        added.receive(weights)
    return heads.transpose(1, 2).contiguous(), None if weights is None else weights.to(query.dtype)


def _own_values(value: Tensor, query: Tensor, mask: Tensor | None) -> Tensor:
    """Return the values ``[B, H, T, D]`` at the positions of the queries, which are the last keys that causality shows them."""
    queries, keys = query.size(2), value.size(2)
    if queries == keys or mask is None:
        own = value[:, :, -queries:]
    else:  # a cache with empty slots behind the last position
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        last = keys - 1 - visible[:, 0].flip(-1).int().argmax(dim=-1)
        own = value.gather(2, last[:, None, :, None].expand(value.size(0), value.size(1), -1, value.size(3)))
    return own.repeat_interleave(query.size(1) // own.size(1), dim=1)


AttentionInterface.register(IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)  # without it transformers drops masks in silence
