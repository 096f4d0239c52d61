"""The attention function that models of ``transformers`` call, and what sees its calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask

from fairseq_lowrank.attention import AttentionConfig
from fairseq_lowrank.attention.watching import changing_calls, receivers_of, receiving_weights
from fairseq_lowrank.huggingface.added import added_to, first_position, inputs_of, mixing_queries_of, parts_of
from fairseq_lowrank.huggingface.models import adds_masks, attention_modules
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.ops import AttentionCall, AttentionMask
from fairseq_lowrank.ops.attention.call import AlreadySet
from fairseq_lowrank.parts.stages import declared

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

    The model has its attention from :func:`apply_attention`. Calls of other threads are not seen.
    """
    return receiving_weights({place[0]: functools.partial(receive, *place) for place in _places(model)})


def attention_calls(
    model: PreTrainedModel, change: Callable[[int, AttentionCall], AttentionCall]
) -> contextlib.AbstractContextManager[None]:
    """Compute ``change(index, call)`` in place of each layer's call while the context is open.

    The index counts :func:`attention_modules`. The model has its attention from :func:`apply_attention`.
    Calls of other threads are not changed.
    """
    return changing_calls({place[0]: functools.partial(change, index) for index, place in enumerate(_places(model))})


def _places(model: PreTrainedModel) -> list[tuple[nn.Module, str, int]]:
    """Return :func:`attention_modules`, if all of them have added attention."""
    places = attention_modules(model)
    for module, _, _ in places:
        added_to(module)
    return places


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
    _check_arguments(module, others)
    added, receivers = added_to(module), receivers_of(module)
    causal = attention_mask is None and query.size(2) > 1 and _is_causal(module, added.causal, is_causal)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = ~attention_mask
    _check_parts(module, query)
    _check_heads(module, added.core.config, query, key, value)
    filled = added.core.filled(module)
    try:
        heads, weights = added.core.attend(
            module,
            query,
            key,
            value,
            AttentionMask(causal=causal, additive=attention_mask),
            inputs=inputs_of(module) if filled.reads_inputs else None,
            mixing_queries=mixing_queries_of(module, query),
            query_start=0 if causal else _query_start(module, filled.reads_positions, query, key),
            scale=scaling,
            score_bias=position_bias,
            score_cap=softcap,
            sinks=s_aux,
            dropout_p=dropout,
            need_weights=bool(output_attentions) or bool(receivers),
        )
    except AlreadySet as error:
        raise UserError(
            f"{type(module).__name__}: {error} Leave this layer out with layers= or sites=, or choose other attention."
        ) from error
    if weights is not None:
        for receive in receivers:
            receive(weights)
    return heads.transpose(1, 2).contiguous(), None if weights is None else weights.to(query.dtype)


def _is_causal(module: nn.Module, chosen: bool | None, given: bool | None) -> bool:
    """Return True if a call without a mask is causal: as the model says, or as it was found, or as its flag says."""
    causal = chosen if given is None else given
    return bool(getattr(module, "is_causal", True) if causal is None else causal)


def _query_start(module: nn.Module, is_read: bool, query: Tensor, key: Tensor) -> int | Tensor | None:
    """Return the number of keys before the first query, if a part reads it and a cache has more keys than queries.

    A causal call without a mask has the first tokens of an empty static cache, whose later slots hold nothing yet.
    """
    if not is_read or key.size(2) == query.size(2):
        return None
    return first_position(module, query.size(2), key.size(2))


def _check_arguments(module: nn.Module, others: dict[str, Any]) -> None:
    """Check that a model passes nothing that is not computed here.

    Raises:
        UserError: it does.
    """
    if unknown := [name for name, given in others.items() if given is not None and name not in _USED_ELSEWHERE]:
        raise UserError(
            f"{type(module).__name__} passes {unknown[0]} to its attention, which is not computed here. "
            'Call apply_attention(model, "mha"), and then model.set_attn_implementation("sdpa"), to use it without mixing.'
        )


def _check_parts(module: nn.Module, query: Tensor) -> None:
    """Move parts to the device of the queries, where hooks may have moved the module.

    Raises:
        UserError: a part has no values.
    """
    for part in parts_of(module).values():  # a part whose weights were moved by hooks may compute on another device
        if any(one._forward_pre_hooks or hasattr(one, "_hf_hook") for one in part.modules()):
            continue  # hooks before the part, such as those of FSDP and of offloading, bring the tensors themselves
        tensors = (*part.parameters(), *part.buffers())
        if any(tensor.is_meta for tensor in tensors) and not query.is_meta:
            raise UserError(
                f"{type(module).__name__}: its {type(declared(part)).__name__} is on the meta device, so it has no values. "
                "Load them with load_attention, or call to_empty and the reset_parameters of this part."
            )
        if any(tensor.device != query.device for tensor in tensors):
            part.to(query.device)


def _check_heads(module: nn.Module, config: AttentionConfig | None, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that the module has all of its heads, and no more.

    Raises:
        UserError: it repeats or splits them.
    """
    heads, groups = query.size(1), getattr(module, "num_key_value_groups", 1)
    if config is not None and config.num_heads != heads:
        raise UserError(
            f"{type(module).__name__}: mixing of {config.num_heads} heads, and the model passes {heads}. "
            "This layer repeats or splits its heads, or sequence parallelism (Ulysses) does. Leave out the layer with layers= or "
            "sites=, or the parallelism."
        )
    for name, states in (("keys", key), ("values", value)):
        if heads not in (states.size(1), states.size(1) * groups):  # fewer heads would be read as groups of heads
            raise UserError(
                f"{type(module).__name__}: {name} of {states.size(1)} heads for queries of {heads} heads, in groups of "
                f"{groups}. Tensor and sequence parallelism of attention are not computed: load the model without them."
            )


def make_mask(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """Return a mask for the chosen attention, and for attention in the same model that cannot be chosen."""
    make = eager_mask if adds_masks(type(config)) else sdpa_mask
    return make(*args, config=config, **kwargs)


AttentionInterface.register(IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, make_mask)  # without it transformers drops masks in silence
