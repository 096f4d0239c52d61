"""Autograd for backends with a hand-written backward pass, which keeps no weights and computes them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fairseq_lowrank.ops.activation import dtype_of_operations
from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.tree import Structure, encode, flatten, is_traced, unflatten
from fairseq_lowrank.ops.first_order import first_order, refuse_transforms


class RecomputeBackend(NamedTuple):
    """The two passes of a backend.

    Args:
        name: of the backend, and of its operator, ``fairseq_lowrank::NAME_attention``.
        forward: takes a call and a seed of dropout. Returns the heads ``[B, H, T, Dv]`` and tensors of linear size to keep.
        backward: takes a call, the seed, the gradient of the heads and the tensors that were kept. Returns the gradients of
            the call's tensors in their order; ``None`` for biases and mixing that need none.
    """

    name: str
    forward: Callable[[AttentionCall, int], tuple[Tensor, Sequence[Tensor]]]
    backward: Callable[[AttentionCall, int, Tensor, Sequence[Tensor]], list[Tensor | None]]

    @property
    def message(self) -> str:
        return (
            f"the {self.name} backend of attention has first derivatives in reverse mode alone: for second derivatives, forward mode "
            'and torch.func choose backend="reference"'
        )


def compute(call: AttentionCall, backend: RecomputeBackend) -> Tensor:
    """Return the heads ``[B, H, T, Dv]``, differentiable. While tracing, and on the meta device, an operator computes them."""
    traced = is_traced(call.v)
    if not traced:
        refuse_transforms(backend.message)
    blocks = call if call.mixes_weights or call.prob_mixing is None else call.replace(prob_mixing=None)
    if not call.v.is_meta and torch.is_autocast_enabled(call.v.device.type):
        scores = call.scores.map_tensors(lambda tensor: tensor.to(dtype_of_operations(tensor)))
        blocks = blocks.replace(scores=scores, v=call.v.to(dtype_of_operations(call.v)))
    # The CPU's generator on every device: nothing waits for a GPU, and checkpointed layers restore its state.
    seed = torch.randint(2**62, (), device="cpu") if call.dropout_p else None
    structure, tensors, numbers = flatten(blocks)
    if traced:
        operator = getattr(torch.ops.fairseq_lowrank, f"{backend.name}_attention")
        return call.scaled(operator(tensors, seed, encode(structure), numbers))
    number = 0 if seed is None else int(seed)
    return call.scaled(_Attention.apply(backend, blocks, structure, numbers, number, *tensors))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        backend: RecomputeBackend,
        call: AttentionCall,
        structure: Structure,
        numbers: list[float],
        seed: int,
        *tensors: Tensor,
    ) -> Tensor:
        # The call itself is not kept: autograd alone holds its tensors, where hooks may move them to another place.
        ctx.backend, ctx.structure, ctx.numbers, ctx.seed = backend, structure, numbers, seed
        heads, kept = backend.forward(call, seed)
        # The masks too: autograd then notices a mask that changes in place before the backward pass reads it.
        ctx.save_for_backward(*tensors, *kept)
        ctx.count = len(tensors)
        return heads

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        backend = ctx.backend
        refuse_transforms(backend.message, grad_output)
        saved = ctx.saved_tensors  # read once: a checkpoint may unpack them only once
        tensors, kept = saved[: ctx.count], saved[ctx.count :]
        with torch.no_grad():
            call = unflatten(ctx.structure, tensors, ctx.numbers)
            gradients = backend.backward(call, ctx.seed, grad_output, kept)
        return None, None, None, None, None, *first_order(gradients, (*tensors, grad_output), backend.message)

    @staticmethod
    def jvp(ctx: Any, backend: RecomputeBackend, *tangents: Tensor | None) -> NoReturn:
        raise NotImplementedError(ctx.backend.message)
