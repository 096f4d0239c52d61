"""What the regularisers penalise: mixing matrices far from orthogonal, and heads that share row or column spaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fairseq_lowrank.ops.activation import at_least_float32, without_autocast
from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.mask import select_head
from fairseq_lowrank.ops.attention.mixing import HeadMixing
from fairseq_lowrank.ops.attention.reference import probabilities
from fairseq_lowrank.ops.attention.tree import Structure, flatten, unflatten
from fairseq_lowrank.ops.first_order import first_order, refuse_transforms

# How many numbers each T×T, S×S or T×S working matrix may hold when sequences are taken several at a time.
BLOCK_NUMBERS = 2**22


def mixing_orthogonality(mixing: HeadMixing, query_padding: Tensor | None = None) -> Tensor:
    """Compute ‖MᵀM − I‖²_F (Mixhead paper, eq. 16): 0 where the mixed heads are orthonormal combinations of the heads.

    For position-wise mixing it is the mean over the positions of a sequence that are not padding. Computed in float32
    or better.

    Args:
        mixing: its :meth:`~.attention.mixing.HeadMixing.mixing_matrix` are M.
        query_padding: ``[B, T]`` bool, true at padding.

    Returns:
        ``[B]``, a value for each sequence; for mixing that is the same at all positions, ``[1]``.
    """
    matrices = mixing.mixing_matrix()
    with without_autocast(matrices):
        identity = torch.eye(matrices.size(-1), dtype=matrices.dtype, device=matrices.device)
        errors = (matrices.transpose(-1, -2) @ matrices - identity).square().sum(dim=(-2, -1))
    if matrices.dim() == 2:
        return errors[None]
    if query_padding is None:
        return errors.mean(dim=1)
    real = ~query_padding
    return (errors * real).sum(dim=1) / real.sum(dim=1).clamp_min(1)


def head_overlap(call: AttentionCall, spaces: Sequence[str], query_padding: Tensor | None = None) -> Tensor:
    """Compute how much the row or column spaces of the heads' attention matrices overlap, for each sequence.

    ``row`` is R_d = Σ_{i<j} ‖P_i P_jᵀ‖²_F and ``column`` is R_c = Σ_{i<j} ‖P_iᵀ P_j‖²_F (Mixhead paper, eq. 20, summed
    over all pairs of heads), of the probabilities P_i before mixing and dropout, with zeros in the rows of padding.

    With G_i = P_iᵀ P_i, ‖P_i P_jᵀ‖² = ⟨G_i, G_j⟩, so that h products serve all h(h − 1)/2 pairs: R_d = Σ_i ⟨G_i, Σ_{j<i} G_j⟩
    with gradient 2 P_i Σ_{j≠i} G_j, and R_c the same with P_i P_iᵀ. Heads are taken one at a time and everything is computed
    again in the backward pass, so that nothing of size h·n² is ever held, and between the passes nothing but what ``call``
    holds: the working memory is a few matrices of n², for as many sequences at once as fit :data:`BLOCK_NUMBERS`.

    The price, for each sequence: 2hTS² floating-point operations for ``row`` and 2hT²S for ``column`` in the forward pass,
    three times that in the backward pass. At T = S = n that is 2n/(3 d_k) times what the products of attention itself cost
    (12hn²d_k for both passes), for each of the two.

    Args:
        call: the call of attention; its values, mixing and dropout are not read, and gradients do not reach its mask.
        spaces: which to compute: ``row``, ``column`` or both.
        query_padding: ``[B, T]`` bool, true at queries that are padding.

    Returns:
        ``[len(spaces), B]`` in float32 or better.

    Raises:
        ValueError: an unknown space.
    """
    if unknown := set(spaces) - set(_GRAM):
        raise ValueError(f"spaces={sorted(unknown)}: expected {', '.join(_GRAM)}")
    refuse_transforms(_FIRST_ORDER)
    # Values and mixing come after the probabilities, so they have no gradient here.
    mask = call.mask if call.mask.additive is None else call.mask.replace(additive=call.mask.additive.detach())
    structure, tensors, numbers = flatten(call.replace(v=call.v.detach(), mask=mask, prob_mixing=None))
    return _HeadOverlap.apply((structure, numbers), tuple(spaces), query_padding, *tensors)


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


def _probabilities(call: AttentionCall, query_padding: Tensor | None, batch: slice, head: int) -> Tensor:
    """Compute P of one head for some sequences, ``[N, T, S]``."""
    one = call.replace(
        scores=call.scores.select_head(
            batch, head, None if call.score_mixing is None else call.score_mixing.column(batch, head)
        ),
        mask=call.mask.select_head(batch, head),
        score_bias=None if call.score_bias is None else select_head(call.score_bias, batch, head),
        distance_bias=None
        if call.distance_bias is None
        else select_head(call.distance_bias[..., None], batch, head)[..., 0],
        score_mixing=None,
        sinks=None if call.sinks is None else call.sinks[head : head + 1],
    )
    p = probabilities(one)[:, 0]
    return p if query_padding is None else p.masked_fill(query_padding[batch, :, None], 0.0)


def _blocks(call: AttentionCall) -> Iterator[slice]:
    """Return slices of as many sequences as :data:`BLOCK_NUMBERS` allows, and at least one."""
    batch, _, queries, keys = call.scores.shape
    size = max(1, BLOCK_NUMBERS // max(queries, keys) ** 2)
    return (slice(start, start + size) for start in range(0, batch, size))


def _wide(tensor: Tensor) -> Tensor:
    """Return floats in float32 or better, detached from the graph, and other tensors as they are."""
    return at_least_float32(tensor.detach()) if tensor.is_floating_point() else tensor


class _HeadOverlap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layout: tuple[Structure, list[float]],
        spaces: tuple[str, ...],
        query_padding: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        # All that is read: autograd then notices that it was changed in place between the passes.
        ctx.save_for_backward(query_padding, *tensors)
        ctx.layout, ctx.spaces = layout, spaces
        call = unflatten(layout[0], [_wide(tensor) for tensor in tensors], layout[1])
        _, heads, _, _ = call.scores.shape
        values = call.v.new_zeros(len(spaces), call.scores.shape[0])
        with without_autocast(call.v):
            for batch in _blocks(call):
                sums: list[Any] = [0.0] * len(spaces)
                for head in range(heads):
                    p = _probabilities(call, query_padding, batch, head)
                    for index, space in enumerate(spaces):
                        gram = _GRAM[space](p)
                        if head:
                            values[index, batch] += (gram * sums[index]).sum(dim=(-2, -1))
                        sums[index] = sums[index] + gram
        return values

    @staticmethod
    def backward(ctx: Any, grad_values: Tensor) -> tuple[Tensor | None, ...]:
        refuse_transforms(_FIRST_ORDER, grad_values)
        query_padding, *tensors = ctx.saved_tensors
        with torch.no_grad():
            gradients = _HeadOverlap.gradients(ctx, query_padding, tensors, grad_values)
        return None, None, None, *first_order(gradients, (*tensors, grad_values), _FIRST_ORDER)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        raise NotImplementedError(_FIRST_ORDER)

    @staticmethod
    def gradients(
        ctx: Any, query_padding: Tensor | None, tensors: Sequence[Tensor], grad_values: Tensor
    ) -> list[Tensor | None]:
        """Return the gradient of each tensor that needs one, summed over heads in float32 or better."""
        needed = ctx.needs_input_grad[3:]
        leaves = [_wide(tensor).requires_grad_(wants) for tensor, wants in zip(tensors, needed, strict=True)]
        call = unflatten(ctx.layout[0], leaves, ctx.layout[1])
        _, heads, _, _ = call.scores.shape
        with without_autocast(call.v):
            for batch in _blocks(call):
                sums: list[Any] = [0.0] * len(ctx.spaces)
                for head in range(heads):
                    p = _probabilities(call, query_padding, batch, head)
                    sums = [total + _GRAM[space](p) for total, space in zip(sums, ctx.spaces, strict=True)]
                for head in range(heads):
                    with torch.enable_grad():
                        p = _probabilities(call, query_padding, batch, head)
                    grad_p = torch.zeros_like(p)
                    for index, space in enumerate(ctx.spaces):
                        others = sums[index] - _GRAM[space](p.detach())
                        grad_p += 2 * grad_values[index, batch, None, None] * _TIMES[space](p.detach(), others)
                    p.backward(grad_p, inputs=[leaf for leaf in leaves if leaf.requires_grad])
        # What no head of no sequence came from has no gradient.
        return [
            None if not wants else torch.zeros_like(t) if leaf.grad is None else leaf.grad.to(t.dtype)
            for t, leaf, wants in zip(tensors, leaves, needed, strict=True)
        ]
