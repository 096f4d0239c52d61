"""What turns a row of attention scores into a row of probabilities."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("softmax", "sigsoftmax")


def activate(logits: Tensor, activation: str) -> Tensor:
    """Normalise the last dimension of ``logits`` with a softmax of :func:`activation_logits`.

    Computed in float32 or better whatever the dtype of ``logits``. A row whose every entry is −inf (all keys masked)
    gives zeros, and no gradient, instead of NaN.

    Args:
        logits: ``[..., S]`` scores, −inf where masked.
        activation: one of :data:`ACTIVATIONS`.

    Returns:
        ``[..., S]`` probabilities in float32 (float64 for float64 input).
    """
    logits = activation_logits(at_least_float32(logits), activation)
    fully_masked = (logits == float("-inf")).all(dim=-1, keepdim=True)
    return torch.softmax(logits.masked_fill(fully_masked, 0.0), dim=-1).masked_fill(fully_masked, 0.0)


def activation_logits(logits: Tensor, activation: str) -> Tensor:
    """The scores whose softmax is the activation: s for softmax, s + log σ(s) for sigsoftmax."""
    if activation == "softmax":
        return logits
    if activation == "sigsoftmax":
        return logits + F.logsigmoid(logits)
    raise ValueError(f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}")


def sigsoftmax(logits: Tensor, dim: int = -1) -> Tensor:
    """sigsoftmax(s)_j = exp(s_j) σ(s_j) / Σ_k exp(s_k) σ(s_k), computed as softmax(s + log σ(s)).

    Source: Mixhead paper, eq. 21, after Kanai et al. (2018). The second form neither overflows nor divides 0 by 0 for
    rows of very low scores.

    Args:
        logits: scores of any shape and floating dtype, −inf where masked.
        dim: the dimension that sums to one.

    Returns:
        Probabilities of the shape and dtype of ``logits``; a row of −inf alone gives zeros.
    """
    return activate(logits.movedim(dim, -1), "sigsoftmax").movedim(-1, dim).to(logits.dtype)


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    """A block in which autocast leaves operations on the device of ``tensor`` alone (the meta device has none)."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


def at_least_float32(tensor: Tensor) -> Tensor:
    """``tensor`` in float32 where it is narrower than that, else unchanged."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
