"""Activations: they turn a row of attention scores into a row of probabilities."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

BufferFn = Callable[..., Tensor]
"""Takes a name and a shape, and returns memory that every block reuses under this name."""

_NO_CONTEXT = nullcontext()
_NARROW = (torch.float16, torch.bfloat16)


class Softmax:
    """exp(s_j) / Σ_k exp(s_k)."""

    name = "softmax"
    shift_invariant = True
    """Whether what is added to every score of a row cancels."""

    def logits(self, scores: Tensor) -> Tensor:
        """Return the scores whose softmax this is."""
        return scores

    def slope(self, scores: Tensor) -> Tensor:
        """Return the derivative of :meth:`logits`."""
        return torch.ones_like(scores)

    def forward(self, scores: Tensor, buffer: BufferFn) -> tuple[Tensor, Tensor | None]:
        """Compute the probabilities of finite ``scores`` in place, and return them with what :meth:`backward` reads."""
        return torch.softmax(scores, -1, out=scores), None

    def backward(self, weights: Tensor, grad: Tensor, sums: Tensor | None, kept: Tensor | None) -> Tensor:
        """Compute ds = P ∘ (dP − Σ_s P ∘ dP) in place of ``grad``.

        If the ``sums`` Σ_s P ∘ dP are given, the result replaces ``weights`` instead.
        """
        if sums is not None:
            return torch.mul(grad.sub_(sums), weights, out=weights)
        return torch.ops.aten._softmax_backward_data.out(grad, weights, -1, weights.dtype, grad_input=grad)


class SigSoftmax(Softmax):
    """exp(s_j) σ(s_j) / Σ_k exp(s_k) σ(s_k) (Mixhead paper, eq. 21, after Kanai et al. 2018)."""

    name = "sigsoftmax"
    shift_invariant = False

    def logits(self, scores: Tensor) -> Tensor:
        """Return s + log σ(s)."""
        return scores + F.logsigmoid(scores)

    def slope(self, scores: Tensor) -> Tensor:
        """Return 2 − σ(s)."""
        return 2 - scores.sigmoid()

    def forward(self, scores: Tensor, buffer: BufferFn) -> tuple[Tensor, Tensor]:
        """Compute exp(s) σ(s), normalised, in place, and return it with σ(s).

        Rows that lie below −40 are shifted up to it within σ: there σ(s) = exp(s) to the last bit, so only a factor
        of the row changes, and it cannot vanish.
        """
        shift = (-40 - scores.amax(dim=-1, keepdim=True)).clamp_(min=0)
        sigmoid = torch.add(scores, shift, out=buffer("sigmoid", *scores.shape)).sigmoid_()
        weights = torch.softmax(scores, -1, out=scores).mul_(sigmoid)
        return weights.div_(weights.sum(dim=-1, keepdim=True)), sigmoid

    def backward(self, weights: Tensor, grad: Tensor, sums: Tensor | None, kept: Tensor | None) -> Tensor:
        """Compute the gradient of softmax times dz/ds = 2 − σ(s), for z = s + log σ(s)."""
        assert kept is not None
        return super().backward(weights, grad, sums, None).mul_(torch.sub(2, kept, out=kept))


ACTIVATIONS = {activation.name: activation for activation in (Softmax(), SigSoftmax())}
"""By name: a formula as a softmax of logits, and forward and backward for a block of scores of the blocked backend."""


def activate(logits: Tensor, activation: str, *, empty_rows: bool = True) -> Tensor:
    """Normalise the last dimension of ``logits``, in float32 or better.

    A row that is −inf everywhere (all keys masked) gives zeros, and no gradient, instead of NaN.

    Args:
        logits: ``[..., S]`` scores, −inf where masked.
        activation: one of :data:`ACTIVATIONS`.
        empty_rows: whether rows may be −inf everywhere. If not, looking for them is saved.

    Returns:
        ``[..., S]`` probabilities in float32 (float64 for float64 input).

    Raises:
        ValueError: an unknown activation.
    """
    if activation != "softmax" or logits.dtype in _NARROW:
        check_activation(activation)
        logits = ACTIVATIONS[activation].logits(at_least_float32(logits))
    if not empty_rows:
        return torch.softmax(logits, dim=-1)
    fully_masked = (logits == float("-inf")).all(dim=-1, keepdim=True)
    return torch.softmax(logits.masked_fill(fully_masked, 0.0), dim=-1).masked_fill(fully_masked, 0.0)


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}")


def sigsoftmax(logits: Tensor, dim: int = -1) -> Tensor:
    """Compute sigsoftmax(s)_j = exp(s_j) σ(s_j) / Σ_k exp(s_k) σ(s_k) as softmax(s + log σ(s)).

    Source: Mixhead paper, eq. 21, after Kanai et al. (2018). The second form neither overflows nor divides 0 by 0 for
    rows of very low scores.

    Args:
        logits: scores of any shape and floating dtype, −inf where masked.
        dim: the dimension that sums to one.

    Returns:
        Probabilities of the shape and dtype of ``logits``; a row of −inf alone gives zeros.
    """
    return activate(logits.movedim(dim, -1), "sigsoftmax").movedim(-1, dim).to(logits.dtype)


def dtype_of_operations(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which operations take ``tensor``.

    It is the tensor's dtype. Where autocast is on, floats other than float64 have autocast's.
    """
    own, device = tensor.dtype, tensor.device.type
    if tensor.is_meta or own == torch.float64 or not own.is_floating_point or not torch.is_autocast_enabled(device):
        return own
    return torch.get_autocast_dtype(device)


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    """Return a context in which autocast does not change operations on the device of ``tensor``."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return _NO_CONTEXT
    return torch.autocast(device, enabled=False)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in float32 if its dtype is narrower, else unchanged."""
    return tensor.float() if tensor.dtype in _NARROW else tensor
