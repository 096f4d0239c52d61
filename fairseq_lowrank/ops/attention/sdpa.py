"""PyTorch's fused ``scaled_dot_product_attention``: softmax attention without mixing."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fairseq_lowrank.ops.attention.contract import AttentionInputs, AttentionMask


def refusal(inputs: AttentionInputs) -> str | None:
    """What of ``inputs`` this backend cannot compute, in words, or ``None``."""
    if inputs.mixing is not None:
        return "head mixing"
    if inputs.activation != "softmax":
        return f"the activation {inputs.activation}"
    if inputs.need_weights:
        return "the attention weights (need_weights)"
    return None


def compute(inputs: AttentionInputs) -> tuple[Tensor, None]:
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    # SDPA aligns its causal mask to the top left, ours is aligned to the bottom right: the same where T = S, and
    # no mask at all where T = 1.
    causal = mask.causal and q.size(2) > 1
    if q.size(2) == 1 or (causal and q.size(2) == k.size(2) and not _other_parts(inputs)):
        mask = AttentionMask(False, mask.key_padding, mask.additive)
    else:
        causal = False
    dense = mask.dense(inputs)
    if inputs.score_bias is not None:
        bias = inputs.score_bias.to(q.dtype)
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
    return heads, None


def _other_parts(inputs: AttentionInputs) -> bool:
    return inputs.mask.key_padding is not None or inputs.mask.additive is not None or inputs.score_bias is not None
