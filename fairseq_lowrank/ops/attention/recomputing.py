"""How a backend with a hand-written backward pass, which keeps no weights and computes them again, meets autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_lowrank.ops.activation import dtype_of_operations
from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.parts import is_traced, put_together, taken_apart
from fairseq_lowrank.ops.first_order import first_order, refuse_transforms


class Recomputing(NamedTuple):
    """A backend's two passes.

    Args:
        name: of the backend, and of its operator, ``fairseq_lowrank::NAME_attention``.
        attend: of a call and a seed of dropout, the heads ``[B, H, T, Dv]``, and tensors of linear size to keep.
        input_gradients: of a call, the seed, the gradient of the heads and what was kept, the gradients of the call's
            tensors in their order; ``None`` for those of biases and mixing that need none.
    """

    name: str
    attend: Callable[[AttentionCall, int], tuple[Tensor, Sequence[Tensor]]]
    input_gradients: Callable[[AttentionCall, int, Tensor, Sequence[Tensor]], list[Tensor | None]]

    @property
    def message(self) -> str:
        return (
            f"the {self.name} backend of attention has first derivatives in reverse mode alone: for second derivatives, forward mode "
            'and torch.func choose backend="reference"'
        )


def compute(call: AttentionCall, backend: Recomputing) -> Tensor:
    """The heads ``[B, H, T, Dv]``, differentiable; under a compiler, an export and on the meta device by an operator."""
    traced = is_traced(call.v)
    if not traced:
        refuse_transforms(backend.message)
    blocks = call if call.mixes_weights else replace(call, mixing=None)
    if not call.v.is_meta and torch.is_autocast_enabled(call.v.device.type):
        scores = call.scores.changed(lambda tensor: tensor.to(dtype_of_operations(tensor)))
        blocks = replace(blocks, scores=scores, v=call.v.to(dtype_of_operations(call.v)))
    # From the CPU's generator whatever the device: nothing waits for a GPU, and checkpointed layers restore it.
    seed = torch.randint(2**62, (), device="cpu") if call.dropout_p else None
    layout, tensors, numbers = taken_apart(blocks)
    if traced:
        operator = getattr(torch.ops.fairseq_lowrank, f"{backend.name}_attention")
        return call.scaled(operator(tensors, seed, layout, numbers))
    return call.scaled(_Attention.apply(backend, layout, numbers, 0 if seed is None else int(seed), *tensors))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend: Recomputing, layout: str, numbers: list[float], seed: int, *tensors: Tensor) -> Tensor:
        ctx.backend, ctx.layout, ctx.numbers, ctx.seed = backend, layout, numbers, seed
        heads, kept = backend.attend(put_together(layout, tensors, numbers), seed)
        # The masks too: autograd then notices that one was changed in place before the backward pass reads it.
        ctx.save_for_backward(*tensors, *kept)
        ctx.count = len(tensors)
        return heads

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        backend = ctx.backend
        refuse_transforms(backend.message, grad_output)
        saved = ctx.saved_tensors  # read once: a checkpoint may hand them out no more often
        tensors, kept = saved[: ctx.count], saved[ctx.count :]
        with torch.no_grad():
            call = put_together(ctx.layout, tensors, ctx.numbers)
            gradients = backend.input_gradients(call, ctx.seed, grad_output, kept)
        return None, None, None, None, *first_order(gradients, (*tensors, grad_output), backend.message)

    @staticmethod
    def jvp(ctx, backend, *tangents):
        raise NotImplementedError(ctx.backend.message)
