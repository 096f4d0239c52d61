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

from fairseq_lowrank.huggingface.added import MODULES
from fairseq_lowrank.huggingface.models import attention_modules, query_sizes
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


@contextlib.contextmanager
def attention_weights(model: PreTrainedModel, receive: Callable[[nn.Module, str, int, Tensor], None]) -> Iterator[None]:
    """Call ``receive(module, site, layer, weights)`` with each layer's mixed weights ``[B, H, T, S]`` while the context is open.

    The model has its attention from :func:`apply_attention`.
    """
    found: list[tuple[Any, str, int]] = attention_modules(model)
    for module, site, layer in found:
        module.attention_weights_receiver = functools.partial(receive, module, site, layer)
    try:
        yield
    finally:
        for module, _, _ in found:
            del module.attention_weights_receiver


@contextlib.contextmanager
def attention_calls(model: PreTrainedModel, change: Callable[[int, AttentionCall], AttentionCall]) -> Iterator[None]:
    """Compute ``change(index, call)`` in place of each layer's call while the context is open.

    The index counts :func:`attention_modules`. The model has its attention from :func:`apply_attention`.
    """
    found: list[tuple[Any, str, int]] = attention_modules(model)
    for index, (module, _, _) in enumerate(found):
        module.attention_call_hook = functools.partial(change, index)
    try:
        yield
    finally:
        for module, _, _ in found:
            del module.attention_call_hook


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
            'Call model.set_attn_implementation("sdpa") to use this model without mixing.'
        )
    if (activation := vars(module).get("attention_activation")) is None:
        folder = getattr(getattr(module, "config", None), "name_or_path", "") or "FOLDER"
        raise UserError(
            f"{type(module).__name__} has no mixing, because from_pretrained does not load it. "
            f'Call load_attention(model, "{folder}"), or model.set_attn_implementation("sdpa") to leave the mixing out.'
        )
    receive = vars(module).get("attention_weights_receiver")
    query_length, key_length = query.size(2), key.size(2)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and attention_mask is None and query_length > 1
    if causal and key_length > query_length:  # the first tokens in an empty static cache: later slots hold nothing yet
        key, value = key[:, :, :query_length], value[:, :, :query_length]
        position_bias = None if position_bias is None else position_bias[..., :query_length]
    hidden = attention_mask
    if hidden is not None and hidden.dtype == torch.bool:
        hidden = ~hidden
    modules: dict[str, Any] = {name: module._modules.get(name) for name in MODULES}
    inputs = vars(module).get("attention_inputs")
    for added in modules.values():  # a module whose weights were moved by hooks may compute on another device
        if added is not None and any(
            tensor.device != query.device for tensor in (*added.parameters(), *added.buffers())
        ):
            added.to(query.device)
    dims = query_sizes(module) if any(modules.values()) else None
    if dims is not None and (mixed := dims.num_heads) != query.size(1):
        raise UserError(
            f"{type(module).__name__}: mixing of {mixed} heads, and the model passes {query.size(1)}. "
            "This layer repeats or splits its heads; leave it out with layers= or sites=."
        )
    call = AttentionCall(
        DotProduct(query, key, scaling),
        value,
        AttentionMask(causal=causal, additive=hidden),
        score_bias=position_bias,
        activation=activation,
        dropout_p=dropout,
        need_weights=bool(output_attentions) or receive is not None,
        score_mixing=None if modules["score_mixing"] is None else modules["score_mixing"].operation(query, inputs),
        prob_mixing=None if modules["mixing"] is None else modules["mixing"].operation(query, inputs),
        score_cap=softcap,
        sinks=s_aux,
    )
    if (hook := vars(module).get("attention_call_hook")) is not None:
        call = hook(call)
    heads, weights = attention(call)
    if receive is not None:
        receive(weights)
    if (output := modules["head_output"]) is not None:
        own = _own_values(value, query, attention_mask) if output.reads_own_value else None
        heads = output(heads, inputs, own).to(query.dtype)
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
