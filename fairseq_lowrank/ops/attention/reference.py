"""The papers' formulas as they stand: every tensor of size T×S is built. All other backends are tested against this."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_lowrank.ops.activation import activate
from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.distances import spread
from fairseq_lowrank.ops.attention.scores import grouped_product


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return what of ``call`` this backend cannot compute: always ``None``."""
    return None


def device_unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why this backend does not run on a device in a dtype: always ``None``, for it runs everywhere."""
    return None


def compute(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Return heads ``[B, H, T, D]``: mixed weights, after dropout, times values; and the mixed weights if they are read."""
    weights = probabilities(call)
    if call.prob_mixing is not None:
        weights = call.prob_mixing.mix_heads(weights)
    used = F.dropout(weights, call.dropout_p) if call.dropout_p else weights
    if used.dtype != call.v.dtype:
        used = used.to(call.v.dtype)
    return grouped_product(used, call.v), weights if call.need_weights else None


def probabilities(call: AttentionCall) -> Tensor:
    """Compute the probabilities ``[B, H, T, S]`` in float32 or better, before heads are mixed."""
    scores = masked_scores(call)
    _, _, queries, keys = scores.shape
    if call.sinks is not None:
        sinks = call.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return activate(torch.cat([scores, sinks], dim=-1), call.activation)[..., :-1]
    biased = call.score_bias is not None or call.distance_bias is not None
    return activate(scores, call.activation, empty_rows=biased or call.mask.may_hide_rows(queries, keys))


def masked_scores(call: AttentionCall) -> Tensor:
    """Compute the input of the activation ``[B, H, T, S]`` in float32 or better: mixed scores, biases, −inf where hidden."""
    scores = call.scores.dense()
    if call.score_cap is not None:
        scores = call.score_cap * torch.tanh(scores / call.score_cap)
    if call.score_mixing is not None:
        scores = call.score_mixing.mix_heads(scores)
    mask = call.mask
    if mask.is_empty and call.score_bias is None and call.distance_bias is None:
        return scores
    _, _, queries, keys = scores.shape
    if call.distance_bias is not None:
        scores = scores + spread(call.distance_bias, queries // mask.query_repeats, keys, mask.query_repeats)
    # Added, as the gradient of a sum costs nothing.
    by_position = mask.by_position(queries, keys, float("-inf"), scores.device)
    for bias in (call.score_bias, mask.bias, by_position):
        if bias is not None:
            scores = scores + bias
    for hidden in (mask.hidden_by_tensors(), mask.hidden_by_formulas(call.scores.shape, scores.device)):
        scores = scores if hidden is None else scores.masked_fill(hidden, float("-inf"))
    return scores
