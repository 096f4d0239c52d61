"""PyTorch's fused ``scaled_dot_product_attention``: softmax attention of dot products.

It computes each head separately, so it cannot mix heads. But mixing after the softmax is a sum of the outputs of each head for
every value: Σ_s Σ_j M_t[j, i] P_j[t, s] V_i[s] = Σ_j M_t[j, i] (P_j V_i)[t]. With G different values these are G plain calls, in
which all heads read the same value, and one product with M. The result is exact, and memory is linear (the outputs G times).
See :func:`value_columns` for the cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from fairseq_lowrank.ops.activation import dtype_of_operations, without_autocast
from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.distances import spread
from fairseq_lowrank.ops.attention.mask import narrowed
from fairseq_lowrank.ops.attention.scores import DotProduct
from fairseq_lowrank.ops.attention.tree import is_traced


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return what this backend cannot compute of ``call``, in words, or ``None``."""
    if (reason := call.for_blocks_alone) is not None:
        return reason
    if not isinstance(call.scores, DotProduct):
        return "scores other than dot products"
    # PyTorch's kernel for CPUs hides before it scales: hidden scores would become the largest, or not a number
    if not is_traced(call.v) and call.dot_product.factor <= 0:
        return f"scores times {call.dot_product.factor:g}, which is not above 0"
    if call.score_mixing is not None:
        return "head mixing of scores, before the softmax"
    if call.mixes_weights and call.dropout_p:
        return "dropout after head mixing"
    if call.activation != "softmax":
        return f"the activation {call.activation}"
    if call.need_weights:
        return "the attention weights (need_weights)"
    return None


def device_unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why this backend does not run on a device in a dtype: always ``None``, for it runs everywhere."""
    return None


def compute(call: AttentionCall) -> tuple[Tensor, None]:
    scores, v = call.dot_product, call.v
    q, k = scores.q, scores.k
    causal, other = hides_later_keys(call), has_other_masks(call)
    tensor = causal and needs_causal_tensor(call)
    dense = None
    if tensor or other:
        dtype = dtype_of_operations(q)
        dense = call.mask.dense(q, k.size(2), dtype)
        for bias in (call.score_bias, _spread(call)):
            if bias is not None:
                dense = narrowed(bias, dtype) if dense is None else dense + narrowed(bias, dtype)
    options: dict[str, Any] = {"dropout_p": call.dropout_p, "is_causal": causal and not tensor, "scale": scores.factor}
    if call.mixes_weights:
        return _mixed(call, partial(_attend, mask=dense, **options)), None
    return call.scaled(_attend(q, k, v, dense, **options)), None


def _spread(call: AttentionCall) -> Tensor | None:
    """Return the bias of distances as one of queries and keys."""
    if call.distance_bias is None:
        return None
    _, _, queries, keys = call.scores.shape
    repeats = call.mask.query_repeats
    return spread(call.distance_bias, queries // repeats, keys, repeats)


def value_columns(call: AttentionCall) -> int:
    """Return how many columns of values each head reads if heads are mixed; unmixed heads read those of one value.

    For each score, a forward pass takes 4 operations a column, and a backward pass 10.
    """
    return call.v.size(1) * _width(call)


def is_fused(call: AttentionCall) -> bool:
    """Return True if PyTorch has a fused GPU kernel for :func:`compute` with mixed heads, where only causality hides.

    It has none for bfloat16 before sm_80, and would build all T×S weights.
    """
    recording = torch.is_grad_enabled()
    examples = (
        tensor.new_empty(1, 1, 8, _width(call)).requires_grad_(recording and tensor.requires_grad)
        for tensor in (call.dot_product.q, call.dot_product.k, call.v)
    )
    asked = SDPAParams(*examples, None, 0.0, True, False)  # type: ignore[arg-type,call-arg]
    return can_use_flash_attention(asked) or can_use_efficient_attention(asked)


def _width(call: AttentionCall) -> int:
    """Return a size of queries, keys and values that every fused kernel takes: one for all, a multiple of 8."""
    return -(-max(call.dot_product.q.size(3), call.v.size(3)) // 8) * 8


def _mixed(call: AttentionCall, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Compute Σ_j M_t[j, i] (P_j V_i)[t] ``[B, H, T, Dv]``."""
    assert call.prob_mixing is not None
    width, groups, dim = _width(call), call.v.size(1), call.v.size(3)
    q, k, v = (
        F.pad(tensor, (0, width - tensor.size(3))) for tensor in (call.dot_product.q, call.dot_product.k, call.v)
    )
    mixed = []
    # Of M the columns of the heads that share a value: [H, H/G], or [B, T, H, H/G].
    for value, matrix in zip(v.split(1, dim=1), call.prob_mixing.mixing_matrix().chunk(groups, dim=-1), strict=True):
        every = attend(q, k, value.expand(-1, k.size(1), -1, -1))[..., :dim]
        with without_autocast(every):
            wide = torch.promote_types(every.dtype, torch.float32)
            mixed.append((matrix.mT.to(wide) @ every.transpose(1, 2).to(wide)).to(every.dtype))
    return torch.cat(mixed, dim=2).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """Return unmixed heads ``[B, H, T, Dv]`` of queries ``[B, H, T, D]``; ``mask`` is added to their scores."""
    heads = q.size(1)
    if mask is None and k.size(1) == v.size(1) == heads:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None, **options)
    groups = _common_groups(k.size(1), v.size(1))
    if groups not in (1, heads):
        # Groups become entries of the batch, whose heads then share what they read: nothing is copied.
        mask = None if mask is None else _grouped(mask, len(v), groups)
        q, k, v = (tensor.unflatten(1, (groups, -1)).flatten(0, 1) for tensor in (q, k, v))
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.size(2))
    k, v = (_shared(tensor, q.size(1)) for tensor in (k, v))
    result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    return result.unflatten(0, (-1, groups)).flatten(1, 2) if groups not in (1, heads) else result


def _common_groups(keys: int, values: int) -> int:
    """Return the largest number of groups that both have. PyTorch 2.6 cannot trace ``math.gcd``."""
    while values:
        keys, values = values, keys % values
    return keys


def _shared(tensor: Tensor, heads: int) -> Tensor:
    """Return keys or values ``[B, G, S, D]`` for each head: a view where all share one, or none does."""
    groups = tensor.size(1)
    if groups in (1, heads):
        return tensor.expand(-1, heads, -1, -1)
    return tensor.repeat_interleave(heads // groups, dim=1)


def _grouped(mask: Tensor, batch: int, groups: int) -> Tensor:
    """Return a mask broadcastable to ``[B, H, T, S]`` as one broadcastable to ``[B·G, H/G, T, S]``."""
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.size(1) > 1:
        return mask.expand(batch, -1, -1, -1).unflatten(1, (groups, -1)).flatten(0, 1)
    return mask if mask.size(0) == 1 else mask.repeat_interleave(groups, dim=0)


def hides_later_keys(call: AttentionCall) -> bool:
    """Return True if causality may hide keys. It hides nothing from one query, which sees every key."""
    return call.mask.hides_later_keys(call.scores.shape[2])


def needs_causal_tensor(call: AttentionCall) -> bool:
    """Return True if causality has to become a T×S tensor: SDPA takes no mask with ``is_causal`` and aligns it top left.

    Ours is aligned bottom right: the same where T = S, and no mask at all where T = 1.
    """
    if not hides_later_keys(call):
        return False
    _, _, queries, keys = call.scores.shape
    return queries != keys or has_other_masks(call) or not call.mask.is_causal_alone


def needs_whole_tensor(call: AttentionCall) -> bool:
    """Return True if causality, documents, a rule or a bias of distances have to become a tensor of queries and keys."""
    mask = call.mask
    if call.distance_bias is not None or mask.documents is not None or mask.rule is not None:
        return True
    return mask.causal and needs_causal_tensor(call)


def has_other_masks(call: AttentionCall) -> bool:
    """Return True if anything but causality hides keys or is added to scores.

    SDPA takes that as a tensor, which flash attention does not take.
    """
    return call.mask.hides_otherwise or call.score_bias is not None or call.distance_bias is not None


def has_two_sizes(call: AttentionCall) -> bool:
    """Return True if values are wider or narrower than keys, which the CPU's fused kernel does not take."""
    return isinstance(call.scores, DotProduct) and call.scores.q.size(3) != call.v.size(3)
