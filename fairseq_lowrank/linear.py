"""Linear layers by oneDNN: x Wᵀ + b in float32 on CPUs, which torch computes by MKL.

oneDNN is faster on some processors and no faster on others. Its results differ from torch's by rounding alone.
:func:`is_faster` measures this processor, :func:`fast_linear` changes a model, and :func:`linear` is the function that does the work.
It leaves every call that it does not support to torch.
"""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

_torch_linear = nn.functional.linear  # also if the name is replaced later
SMALLEST = 2**22
"""The fewest multiplications that oneDNN is given: a smaller product takes less time than a call of oneDNN."""
MOST_RATIO = 0.9
"""oneDNN counts as faster if it takes at most this share of torch's time."""


def is_available() -> bool:
    """Return True if this torch has oneDNN's product with the arguments that :func:`linear` passes."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        _product(torch.zeros(2, 2), torch.zeros(2, 2), None)
    except (AttributeError, RuntimeError, TypeError):  # another torch: no such operator, or other arguments
        return False
    return True


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """x Wᵀ + b; x: ``[..., inputs]``, W: ``[outputs, inputs]``, b: ``[outputs]`` or None. Its gradient has gradients too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = _Linear.apply(rows, weight.mT.contiguous(), None).view_as(x)
        if ctx.needs_input_grad[1]:
            of_weight = _Linear.apply(rows.mT.contiguous(), x.flatten(0, -2).mT.contiguous(), None)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias


def _is_supported(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return True for a product of float32 matrices in memory that torch neither traces, casts nor transforms."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if x.dtype is not torch.float32 or x.device.type != "cpu" or weight.dim() != 2:
        return False
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.numel()
        if not plain or tensor.dtype is not torch.float32 or tensor.device.type != "cpu":
            return False
    return not (
        x.dim() < 2
        or x.numel() * weight.size(0) < SMALLEST
        or torch.is_autocast_enabled("cpu")
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b like ``torch.nn.functional.linear``, by oneDNN if it supports the call.

    Args:
        x: ``[..., inputs]``.
        weight: ``[outputs, inputs]``.
        bias: ``[outputs]``.
    """
    if _is_supported(x, weight, bias):
        return _Linear.apply(x, weight, bias)
    return _torch_linear(x, weight, bias)


class OneDNNLinear(nn.Linear):
    """An ``nn.Linear`` that computes its product by :func:`linear`. States, hooks and tied weights are those of ``nn.Linear``."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def fast_linear(model: nn.Module) -> nn.Module:
    """Let the linear layers of a model compute by oneDNN, in place. Subclasses of ``nn.Linear`` stay as they are.

    This pays in float32 on CPUs on which :func:`is_faster` is True.

    Returns:
        the model. If this torch lacks the operator, it is unchanged, and a warning says so.
    """
    if not is_available():
        warnings.warn(f"torch {torch.__version__} has no linear layer by oneDNN: torch's own is used", stacklevel=2)
        return model
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDNNLinear
    return model


def is_faster(seconds: float = 0.1) -> bool:
    """Return True if oneDNN takes at most :data:`MOST_RATIO` of torch's time on this processor: forward and backward, in turns.

    Args:
        seconds: how long to measure.
    """
    if not is_available():
        return False
    x, weight = torch.randn(512, 256), torch.randn(512, 256)
    x.requires_grad_()
    weight.requires_grad_()
    gradient = torch.ones(512, 512)

    def timed(function: Any) -> float:
        start = time.perf_counter()
        torch.autograd.grad(function(x, weight), (x, weight), gradient)
        return time.perf_counter() - start

    for function in (linear, _torch_linear):
        timed(function)
    ratios: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not ratios:
        ratios.append(timed(linear) / timed(_torch_linear))
    return statistics.median(ratios) <= MOST_RATIO
