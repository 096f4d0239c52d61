"""PyTorch's fused ``scaled_dot_product_attention``: softmax attention without mixing across heads."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fairseq_lowrank.ops.attention.contract import AttentionInputs, AttentionMask, narrowed


def refusal(inputs: AttentionInputs) -> str | None:
    """What of ``inputs`` this backend cannot compute, in words, or ``None``."""
    if inputs.mixing is not None and not inputs.mixing.is_diagonal:
        return "head mixing"
    if inputs.activation != "softmax":
        return f"the activation {inputs.activation}"
    if inputs.need_weights:
        return "the attention weights (need_weights)"
    return None


def compute(inputs: AttentionInputs) -> tuple[Tensor, None]:
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    causal = mask.causal and q.size(2) > 1 and not needs_causal_tensor(inputs)
    if causal or q.size(2) == 1:
        mask = AttentionMask(False, mask.key_padding, mask.additive)
    dense = mask.dense(inputs)
    if inputs.score_bias is not None:
        bias = narrowed(inputs.score_bias, q.dtype)
        dense = bias if dense is None else dense + bias
    if dense is not None:
        dense = dense.expand(*q.shape[:3], k.size(2))
    heads = F.scaled_dot_product_attention(
        q,
        k.expand(-1, q.size(1), -1, -1),
        v.expand(-1, q.size(1), -1, -1),
        attn_mask=dense,
        dropout_p=inputs.dropout_p,
        is_causal=causal,
        scale=inputs.scale,
    )
    return heads if inputs.head_scale is None else heads * inputs.head_scale, None


def needs_causal_tensor(inputs: AttentionInputs) -> bool:
    """Whether causality has to become a T×S tensor: SDPA takes no mask beside ``is_causal`` and aligns it top left.

    Ours is aligned bottom right: the same where T = S, and no mask at all where T = 1.
    """
    mask, queries, keys = inputs.mask, inputs.q.size(2), inputs.k.size(2)
    other_parts = mask.key_padding is not None or mask.additive is not None or inputs.score_bias is not None
    return mask.causal and queries > 1 and (queries != keys or other_parts)
