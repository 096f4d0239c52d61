"""The recomputing backends as registered operators, for code that traces operations without running them.

``torch.compile`` and ``torch.export`` keep ``fairseq_lowrank::blocked_attention`` (``triton_attention``, ``tiled_attention``) as one node for all
lengths. On the meta device the operator gives shapes. Eager code does not use these operators, which saves the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fairseq_lowrank.ops.attention import blocked, tiled, triton
from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.recomputing import RecomputeBackend
from fairseq_lowrank.ops.attention.tree import decode, empty_heads, unflatten

# The layout is a constant of the graph, in text so that an exported program loads in another process.
_INPUTS = "Tensor[] tensors, Tensor? seed, str layout, float[] numbers"

_library = torch.library.Library("fairseq_lowrank", "DEF")


def _call(layout: str, tensors: Sequence[Tensor], numbers: Sequence[float]) -> AttentionCall:
    return unflatten(decode(layout), tensors, numbers)


def _register(backend: RecomputeBackend) -> None:
    name = f"{backend.name}_attention"
    _library.define(f"{name}({_INPUTS}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    _library.define(
        f"{name}_backward({_INPUTS}, Tensor grad_output, bool[] needed) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag
    )

    def forward(tensors: list[Tensor], seed: Tensor | None, layout: str, numbers: list[float]) -> Tensor:
        return backend.forward(_call(layout, tensors, numbers), _number(seed))[0]

    def backward(
        tensors: list[Tensor],
        seed: Tensor | None,
        layout: str,
        numbers: list[float],
        grad_output: Tensor,
        needed: Sequence[bool],
    ) -> list[Tensor]:
        pairs = zip(tensors, needed, strict=True)
        call = _call(layout, [tensor.detach().requires_grad_(wanted) for tensor, wanted in pairs], numbers)
        gradients = backend.backward(call, _number(seed), grad_output, ())
        results = _empty_gradients(tensors, needed)
        for result, gradient in zip(results, _needed(gradients, needed), strict=True):
            result.copy_(gradient)
        return results

    def differentiate(ctx: Any, grad_output: Tensor) -> tuple[list[Tensor | None], None, None, None]:
        needed = list(ctx.needs_input_grad[0])
        *tensors, seed = ctx.saved_tensors
        operator = getattr(torch.ops.fairseq_lowrank, f"{name}_backward")
        gradients = iter(operator(tensors, seed, *ctx.settings, grad_output, needed))
        return [next(gradients) if wanted else None for wanted in needed], None, None, None

    def refuse(ctx: Any, *gradients: Tensor | None) -> NoReturn:
        raise NotImplementedError(backend.message)

    _library.impl(name, forward, "CompositeExplicitAutograd")
    _library.impl(f"{name}_backward", backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fairseq_lowrank::{name}", _shapes, lib=_library)
    torch.library.register_fake(f"fairseq_lowrank::{name}_backward", _backward_shapes, lib=_library)
    torch.library.register_autograd(f"fairseq_lowrank::{name}", differentiate, setup_context=_save, lib=_library)
    torch.library.register_autograd(f"fairseq_lowrank::{name}_backward", refuse, lib=_library)


def _number(seed: Tensor | None) -> int:
    return 0 if seed is None else int(seed)


def _shapes(tensors: list[Tensor], seed: Tensor | None, layout: str, numbers: list[float]) -> Tensor:
    call = _call(layout, tensors, numbers)
    _, heads, queries, _ = call.scores.shape
    return empty_heads(call.v, queries, heads, call.v.size(3))


def _backward_shapes(
    tensors: list[Tensor],
    seed: Tensor | None,
    layout: str,
    numbers: list[float],
    grad_output: Tensor,
    needed: Sequence[bool],
) -> list[Tensor]:
    return _empty_gradients(tensors, needed)


def _empty_gradients(tensors: list[Tensor], needed: Sequence[bool]) -> list[Tensor]:
    """Return memory for the gradients that are needed, with a layout that does not depend on the backend."""
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in _needed(tensors, needed)]


def _needed(tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor]:
    return [tensor for tensor, wanted in zip(tensors, needed, strict=True) if wanted and tensor is not None]


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    tensors, seed, *ctx.settings = inputs
    ctx.save_for_backward(*tensors, seed)


for _backend in (blocked.BACKEND, triton.BACKEND, tiled.BACKEND):
    _register(_backend)
