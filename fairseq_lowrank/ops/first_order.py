"""Errors of hand-written backward passes for more than first derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor


def refuse_transforms(message: str, gradient: Tensor | None = None) -> None:
    """Raise where ``torch.func`` (vmap, grad, jvp, …) or a batch of gradients would look into the computation.

    Raises:
        NotImplementedError: with this message.
    """
    # What torch.autograd itself asks; there are no public names for it.
    batched = gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient)
    if batched or torch._C._are_functorch_transforms_active():
        raise NotImplementedError(message)


def first_order(gradients: Sequence[Tensor | None], sources: Sequence[Tensor | None], message: str) -> tuple:
    """Return ``gradients`` as they are, except that differentiating them raises ``message``.

    ``torch.autograd.function.once_differentiable`` only cuts gradients off from what they were computed from, so that a
    graph which holds another path gives a wrong second derivative without a word.

    Args:
        gradients: what a backward pass computed, outside of autograd.
        sources: what it was computed from.
    """
    if not torch.is_grad_enabled():  # no create_graph
        return tuple(gradients)
    present = [gradient for gradient in gradients if gradient is not None]
    marked = iter(_FirstOrder.apply(message, len(present), *present, *sources))
    return tuple(None if gradient is None else next(marked) for gradient in gradients)


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.message = message
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> NoReturn:
        raise NotImplementedError(ctx.message)
