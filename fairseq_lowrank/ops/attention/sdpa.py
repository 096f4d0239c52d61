"""PyTorch's fused ``scaled_dot_product_attention``: softmax attention of dot products without mixing across heads."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.mask import narrowed
from fairseq_lowrank.ops.attention.scores import DotProduct


def cannot(call: AttentionCall) -> str | None:
    """What of ``call`` this backend cannot compute, in words, or ``None``."""
    if not isinstance(call.scores, DotProduct):
        return "scores other than dot products"
    if call.before is not None or call.mixes_weights:
        return "head mixing"
    if call.activation != "softmax":
        return f"the activation {call.activation}"
    if call.need_weights:
        return "the attention weights (need_weights)"
    return None


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend does not run on a device in a dtype: it does everywhere."""
    return None


def compute(call: AttentionCall) -> tuple[Tensor, None]:
    q, k, v, mask = call.scores.q, call.scores.k, call.v, call.mask
    causal = hides_later_keys(call) and not needs_causal_tensor(call)
    if causal or not hides_later_keys(call):
        mask = replace(mask, causal=False)
    dense = mask.dense(q, k.size(2))
    if call.score_bias is not None:
        bias = narrowed(call.score_bias, q.dtype)
        dense = bias if dense is None else dense + bias
    heads = q.size(1)
    groups = math.gcd(k.size(1), v.size(1))
    if groups not in (1, heads):
        # Groups become entries of the batch, whose heads then share what they read: nothing is copied.
        q, k, v = (tensor.unflatten(1, (groups, -1)).flatten(0, 1) for tensor in (q, k, v))
        dense = None if dense is None else _grouped(dense, len(call.v), groups)
    if dense is not None:
        dense = dense.expand(*q.shape[:3], k.size(2))
    result = F.scaled_dot_product_attention(
        q,
        _shared(k, q.size(1)),
        _shared(v, q.size(1)),
        attn_mask=dense,
        dropout_p=call.dropout_p,
        is_causal=causal,
        scale=call.scores.factor,
    )
    if groups not in (1, heads):
        result = result.unflatten(0, (-1, groups)).flatten(1, 2)
    return call.scaled(result), None


def _shared(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values ``[B, G, S, D]`` for each head: a view where all share one, or none does."""
    groups = tensor.size(1)
    if groups in (1, heads):
        return tensor.expand(-1, heads, -1, -1)
    return tensor.repeat_interleave(heads // groups, dim=1)


def _grouped(mask: Tensor, batch: int, groups: int) -> Tensor:
    """A mask broadcastable to ``[B, H, T, S]`` as one broadcastable to ``[B·G, H/G, T, S]``."""
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.size(1) > 1:
        return mask.expand(batch, -1, -1, -1).unflatten(1, (groups, -1)).flatten(0, 1)
    return mask if mask.size(0) == 1 else mask.repeat_interleave(groups, dim=0)


def hides_later_keys(call: AttentionCall) -> bool:
    """Whether causality hides anything: not from one query, which sees every key."""
    return call.mask.causal and call.scores.shape[2] > call.mask.repeats


def needs_causal_tensor(call: AttentionCall) -> bool:
    """Whether causality has to become a T×S tensor: SDPA takes no mask beside ``is_causal`` and aligns it top left.

    Ours is aligned bottom right: the same where T = S, and no mask at all where T = 1.
    """
    mask, (_, _, queries, keys) = call.mask, call.scores.shape
    other_parts = mask.key_padding is not None or mask.additive is not None or call.score_bias is not None
    other_parts = other_parts or mask.appended or mask.repeats > 1
    return hides_later_keys(call) and (queries != keys or other_parts)
