"""The papers' formulas as they stand: every tensor of size T×S is built. All other backends are tested against this."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_lowrank.ops.activation import activate, at_least_float32
from fairseq_lowrank.ops.attention.contract import AttentionInputs, AttentionMask, HeadMixing


def refusal(inputs: AttentionInputs) -> str | None:
    """What of ``inputs`` this backend cannot compute: nothing."""
    return None


def compute(inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    scores = masked_scores(inputs.q, inputs.k, inputs.mask, inputs.scale, inputs.score_bias)
    weights = activate(scores, inputs.activation)
    if inputs.mixing is not None:
        weights = mix(weights, inputs.mixing, inputs.mixing_query)
    dropped = F.dropout(weights, inputs.dropout_p) if inputs.dropout_p else weights
    heads = torch.matmul(dropped.to(inputs.v.dtype), inputs.v)
    return heads, weights if inputs.need_weights else None


def masked_scores(q: Tensor, k: Tensor, mask: AttentionMask, scale: float, score_bias: Tensor | None) -> Tensor:
    """scale · q kᵀ + score_bias + masks, ``[B, H, T, S]``, in float32 or better."""
    scores = at_least_float32(torch.matmul(q * scale, k.transpose(-1, -2)))
    for bias in (score_bias, mask.bias):
        if bias is not None:
            scores = scores + bias
    hidden = mask.hidden(q.size(2), k.size(2), q.device)
    return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))


def mix(weights: Tensor, mixing: HeadMixing, mixing_query: Tensor | None) -> Tensor:
    """P̄_i[t] = Σ_j M_t[j, i] P_j[t] for ``weights`` P ``[B, H, T, S]`` (Mixhead paper, eq. 12)."""
    matrices = mixing.matrices(mixing_query).to(weights.dtype)
    equation = "ji,bjts->bits" if matrices.dim() == 2 else "btji,bjts->bits"
    return torch.einsum(equation, matrices, weights)
