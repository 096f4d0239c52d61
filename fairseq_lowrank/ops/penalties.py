"""What the regularisers penalise: mixing matrices far from orthogonal, and heads that share row or column spaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fairseq_lowrank.ops.activation import activate, at_least_float32, without_autocast
from fairseq_lowrank.ops.attention.contract import AttentionMask, HeadMixing
from fairseq_lowrank.ops.attention.reference import masked_scores
from fairseq_lowrank.ops.first_order import first_order, refuse_transforms

# How many numbers each T×T, S×S or T×S working matrix may hold when sequences are taken several at a time.
BLOCK_NUMBERS = 2**22


def mixing_orthogonality(
    mixing: HeadMixing, mixing_query: Tensor | None = None, query_padding: Tensor | None = None
) -> Tensor:
    """‖MᵀM − I‖²_F (Mixhead paper, eq. 16): 0 where the mixed heads are orthonormal combinations of the heads.

    For position-wise mixing it is the mean over the positions of a sequence that are not padding. Computed in float32
    or better.

    Args:
        mixing: M, or B and W^M.
        mixing_query: ``[B, H, T, D]`` queries that position-wise mixing reads.
        query_padding: ``[B, T]`` bool, true at padding.

    Returns:
        ``[B]``, a value for each sequence; for mixing that is the same at all positions, ``[1]``.
    """
    wide = [None if tensor is None else at_least_float32(tensor) for tensor in (*mixing, mixing_query)]
    with without_autocast(mixing.weight):
        matrices = HeadMixing(*wide[:2]).matrices(wide[2])
        identity = torch.eye(matrices.size(-1), dtype=matrices.dtype, device=matrices.device)
        errors = (matrices.transpose(-1, -2) @ matrices - identity).square().sum(dim=(-2, -1))
    if mixing.query_weight is None:
        return errors[None]
    if query_padding is None:
        return errors.mean(dim=1)
    real = ~query_padding
    return (errors * real).sum(dim=1) / real.sum(dim=1).clamp_min(1)


def head_overlap(
    q: Tensor,
    k: Tensor,
    *,
    spaces: Sequence[str],
    mask: AttentionMask | None = None,
    activation: str = "softmax",
    score_bias: Tensor | None = None,
    scale: float | None = None,
    query_padding: Tensor | None = None,
) -> Tensor:
    """How much the row or column spaces of the heads' attention matrices overlap, for each sequence.

    ``row`` is R_d = Σ_{i<j} ‖P_i P_jᵀ‖²_F and ``column`` is R_c = Σ_{i<j} ‖P_iᵀ P_j‖²_F (Mixhead paper, eq. 20, summed
    over all pairs of heads), of the probabilities P_i before mixing and dropout, with zeros in the rows of padding.

    With G_i = P_iᵀ P_i, ‖P_i P_jᵀ‖² = ⟨G_i, G_j⟩, so that h products serve all h(h − 1)/2 pairs: R_d = Σ_i ⟨G_i, Σ_{j<i} G_j⟩
    with gradient 2 P_i Σ_{j≠i} G_j, and R_c the same with P_i P_iᵀ. Heads are taken one at a time and everything is computed
    again in the backward pass, so that nothing of size h·n² is ever held, and between the passes nothing but ``q``, ``k`` and
    ``score_bias``: the working memory is a few matrices of n², for as many sequences at once as fit :data:`BLOCK_NUMBERS`.

    The price, for each sequence: 2hTS² floating-point operations for ``row`` and 2hT²S for ``column`` in the forward pass,
    three times that in the backward pass. At T = S = n that is 2n/(3 d_k) times what the products of attention itself cost
    (12hn²d_k for both passes), for each of the two.

    Args:
        q: ``[B, H, T, D]`` queries.
        k: ``[B, G, S, D]`` keys, G = H or 1.
        spaces: which to compute: ``row``, ``column`` or both.
        mask: which keys each query may see; gradients do not reach it.
        activation: ``softmax`` or ``sigsoftmax``.
        score_bias: added to the scaled scores, broadcastable to ``[B, H, T, S]``.
        scale: factor of the scores, by default 1/√D.
        query_padding: ``[B, T]`` bool, true at queries that are padding.

    Returns:
        ``[len(spaces), B]`` in float32 or better.

    Raises:
        ValueError: an unknown space.
    """
    if unknown := set(spaces) - set(_GRAM):
        raise ValueError(f"spaces={sorted(unknown)}: expected {', '.join(_GRAM)}")
    mask = mask or AttentionMask()
    scale = q.size(-1) ** -0.5 if scale is None else scale

    def probabilities(q: Tensor, k: Tensor, score_bias: Tensor | None, rows: slice, head: int) -> Tensor:
        """P of one head for some sequences, ``[N, T, S]``, from their parts of the tensors."""
        padding = None if mask.key_padding is None else mask.key_padding[rows]
        visible = AttentionMask(mask.causal, padding, _part(mask.additive, rows, head))
        scores = masked_scores(at_least_float32(q), at_least_float32(k), visible, scale, score_bias)
        p = activate(scores, activation)[:, 0]
        return p if query_padding is None else p.masked_fill(query_padding[rows, :, None], 0.0)

    refuse_transforms(_FIRST_ORDER)
    additive = None if mask.additive is None else mask.additive.detach()
    read = (mask.key_padding, additive, query_padding)
    return _HeadOverlap.apply(q, k, score_bias, probabilities, tuple(spaces), *read)


_FIRST_ORDER = (
    "head_overlap has first derivatives in reverse mode alone: no second derivatives, forward mode or torch.func"
)


_GRAM: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda p: p.transpose(-1, -2) @ p,
    "column": lambda p: p @ p.transpose(-1, -2),
}
# The gradient of ½⟨G_i, A⟩ with respect to P_i, for a symmetric A.
_TIMES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "row": lambda p, others: p @ others,
    "column": lambda p, others: others @ p,
}


def _part(tensor: Tensor | None, rows: slice, head: int) -> Tensor | None:
    """The view of one head and some sequences of a tensor broadcastable to ``[B, H, ., .]``."""
    if tensor is None or tensor.dim() < 3:
        return tensor
    if tensor.dim() == 4 and tensor.size(0) > 1:
        tensor = tensor[rows]
    return tensor.narrow(-3, head if tensor.size(-3) > 1 else 0, 1)


def _blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """As many sequences at a time as :data:`BLOCK_NUMBERS` allows, and at least one."""
    size = max(1, BLOCK_NUMBERS // max(q.size(2), k.size(2)) ** 2)
    return (slice(start, start + size) for start in range(0, q.size(0), size))


class _HeadOverlap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, score_bias, probabilities, spaces, *read):
        # What ``probabilities`` reads besides: autograd then notices that it was changed in place between the passes.
        ctx.save_for_backward(q, k, score_bias, *read)
        ctx.probabilities, ctx.spaces = probabilities, spaces
        values = at_least_float32(q.new_zeros(len(spaces), q.size(0)))
        with without_autocast(q):
            for rows in _blocks(q, k):
                sums = [0.0] * len(spaces)
                for head in range(q.size(1)):
                    p = probabilities(*(_part(tensor, rows, head) for tensor in (q, k, score_bias)), rows, head)
                    for index, space in enumerate(spaces):
                        gram = _GRAM[space](p)
                        if head:
                            values[index, rows] += (gram * sums[index]).sum(dim=(-2, -1))
                        sums[index] = sums[index] + gram
        return values

    @staticmethod
    def backward(ctx, grad_values):
        refuse_transforms(_FIRST_ORDER, grad_values)
        tensors = ctx.saved_tensors[:3]
        with torch.no_grad():
            gradients = _HeadOverlap.gradients(ctx, tensors, grad_values)
        return *first_order(gradients, (*tensors, grad_values), _FIRST_ORDER), *[None] * 5

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(_FIRST_ORDER)

    @staticmethod
    def gradients(ctx, tensors, grad_values):
        """Of q, k and the bias, each where it is needed."""
        q, k, _ = tensors
        wanted = ctx.needs_input_grad[:3]
        # Summed over heads, and in half precision too, in float32.
        grads = [
            at_least_float32(torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)) if needed else None
            for tensor, needed in zip(tensors, wanted, strict=True)
        ]
        with without_autocast(q):
            for rows in _blocks(q, k):
                sums = [0.0] * len(ctx.spaces)
                for head in range(q.size(1)):
                    p = ctx.probabilities(*(_part(tensor, rows, head) for tensor in tensors), rows, head)
                    sums = [total + _GRAM[space](p) for total, space in zip(sums, ctx.spaces, strict=True)]
                for head in range(q.size(1)):
                    parts = [_part(tensor, rows, head) for tensor in tensors]
                    parts = [None if part is None else at_least_float32(part.detach()) for part in parts]
                    leaves = [part.requires_grad_() for part, needed in zip(parts, wanted, strict=True) if needed]
                    with torch.enable_grad():
                        p = ctx.probabilities(*parts, rows, head)
                    grad_p = torch.zeros_like(p)
                    for index, space in enumerate(ctx.spaces):
                        others = sums[index] - _GRAM[space](p.detach())
                        grad_p += 2 * grad_values[index, rows, None, None] * _TIMES[space](p.detach(), others)
                    into = [_part(grad, rows, head) for grad in grads if grad is not None]
                    for total, grad in zip(into, torch.autograd.grad(p, leaves, grad_p), strict=True):
                        total += grad
        return [None if g is None else g.to(tensor.dtype) for g, tensor in zip(grads, tensors, strict=True)]
