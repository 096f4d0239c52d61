"""Attention as the kernels compute it in 16 bits: the formula in float64, rounded where they round."""

import math
import os

import torch

from fairseq_lowrank.ops.attention import PositionwiseMixing

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def rounded(tensor, dtype):
    """``tensor`` in ``dtype``, as float64. Triton's interpreter truncates float32 to bfloat16."""
    if dtype == torch.bfloat16 and INTERPRETED:
        return (tensor.float().view(torch.int32) & -65536).view(torch.float32).double()
    return tensor.to(dtype).double()


def heads_and_gradients(call, cotangent, *, merged):
    """Heads and gradients of q, k, v, then of the matrix before and of the matrix after the softmax, of a causal call.

    ``merged``: dq comes from Σ P dP k − D Σ P k (tiled kernels), else from Σ P (dP − D) k.
    """
    dtype = call.v.dtype

    def cut(tensor):
        return rounded(tensor, dtype)

    q, k, v, grad = (x.detach().double() for x in (call.dot_product.q, call.dot_product.k, call.v, cotangent))
    scale, before, after = call.dot_product.factor, call.score_mixing, call.prob_mixing
    unmixed = q @ k.mT * scale
    scores = unmixed
    if before is not None:
        scores = torch.einsum("ji,bjts->bits", before.weight.detach().double(), unmixed)
    sigmoid = scores.sigmoid()
    slope = 2 - sigmoid if call.activation == "sigsoftmax" else torch.ones_like(scores)
    logits = scores + sigmoid.log() if call.activation == "sigsoftmax" else scores
    hidden = call.mask.by_position(*call.scores.shape[2:], True, q.device).bool()
    logits = logits.masked_fill(hidden, float("-inf"))
    weights = logits.softmax(-1).nan_to_num()
    mixed, grad_mixed = weights, grad @ v.mT
    if after is not None:
        matrix, grad_mixed = cut(after.weight.detach()), cut(grad_mixed)
        rule = ("btji", "btji") if isinstance(after, PositionwiseMixing) else ("ji", "ji")
        mixed = torch.einsum(f"{rule[0]},bjts->bits", matrix, cut(weights))
        grad_weights = torch.einsum(f"{rule[0]},bits->bjts", matrix, grad_mixed)
        of_after = torch.einsum(f"bjts,bits->{rule[1]}", cut(weights), grad_mixed)
    else:
        grad_weights, of_after = grad_mixed, None
    heads = cut(cut(mixed) @ v)
    if after is None:
        sums = (grad * heads).sum(-1, keepdim=True)
    elif isinstance(after, PositionwiseMixing) and not merged:
        # One kernel takes the sums from the gradient of the matrices.
        sums = (after.weight.detach().double() * of_after).sum(-1).mT[..., None]
    else:
        product = weights * grad_weights
        sums = (cut(product) if merged else product).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - sums) * slope
    of_before, back = None, grad_scores
    if before is not None:
        # one kernel has scores of base 2
        base = 1 / math.log(2) if merged else 1.0
        of_before = torch.einsum("bjts,bits->ji", cut(unmixed * base) / base, cut(grad_scores))
        back = torch.einsum("ji,bits->bjts", cut(before.weight.detach()), cut(grad_scores))
    of_q = cut(back) @ k * scale
    if merged and after is not None and before is None:
        # The pass of statistics divides by the row sum at the end.
        exponents = scores + scores.clamp(max=0) if call.activation == "sigsoftmax" else scores
        powers = (logits - exponents.masked_fill(hidden, float("-inf")).amax(-1, keepdim=True)).exp()
        average = cut(cut(powers * slope) @ k / powers.sum(-1, keepdim=True))
        of_q = (cut(weights * grad_weights * slope) @ k - sums * average) * scale
    if isinstance(after, PositionwiseMixing):
        of_after = rounded(of_after, after.weight.dtype)
    of_k, of_v = cut(back).mT @ q * scale, cut(mixed).mT @ grad
    return [heads, *map(cut, (of_q, of_k, of_v)), *(x for x in (of_before, of_after) if x is not None)]
