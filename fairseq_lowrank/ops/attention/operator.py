"""The blocked backend as registered operators, for whatever looks at operations without running them.

``torch.compile`` and ``torch.export`` keep ``fairseq_lowrank::blocked_attention`` as one node, of any length, and on the
meta device it gives shapes. Running code does not come here: it spares itself the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_lowrank.ops.attention.blocked import (
    FIRST_ORDER,
    BlockCall,
    BlockTensors,
    attend,
    empty_heads,
    input_gradients,
)

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? matrices, Tensor? score_bias, Tensor? mask_bias, Tensor? padding, "
    "Tensor? hidden, Tensor? seed, bool causal, str activation, float scale, float dropout_p"
)
_DIFFERENTIATED = 6  # the first tensors

_library = torch.library.Library("fairseq_lowrank", "DEF")
_library.define(f"blocked_attention({_INPUTS}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_library.define(
    f"blocked_attention_backward({_INPUTS}, Tensor grad_output, bool[] needed) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


def _parts(inputs: Sequence) -> tuple[BlockCall, BlockTensors]:
    *tensors, seed, causal, activation, scale, dropout_p = inputs
    return BlockCall(causal, activation, scale, dropout_p, 0 if seed is None else int(seed)), BlockTensors(*tensors)


@torch.library.impl(_library, "blocked_attention", "CompositeExplicitAutograd")
def _forward(*inputs) -> Tensor:
    return attend(*_parts(inputs))


@torch.library.register_fake("fairseq_lowrank::blocked_attention", lib=_library)
def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *rest) -> Tensor:
    return empty_heads(v, q.size(2), q.size(1), v.size(3))


@torch.library.impl(_library, "blocked_attention_backward", "CompositeExplicitAutograd")
def _backward(*inputs) -> list[Tensor]:
    *inputs, grad_output, needed = inputs
    call, tensors = _parts(inputs)
    if tensors.matrices is not None:
        tensors = tensors._replace(matrices=tensors.matrices.detach().requires_grad_(needed[3]))
    gradients = input_gradients(call, tensors, grad_output, needed[4:])
    results = _empty_gradients(tensors, needed)
    for result, gradient in zip(results, _needed(gradients, needed), strict=True):
        result.copy_(gradient)
    return results


@torch.library.register_fake("fairseq_lowrank::blocked_attention_backward", lib=_library)
def _backward_shapes(*inputs) -> list[Tensor]:
    *tensors, needed = (*inputs[: len(BlockTensors._fields)], inputs[-1])
    return _empty_gradients(BlockTensors(*tensors), needed)


def _empty_gradients(tensors: BlockTensors, needed: Sequence[bool]) -> list[Tensor]:
    """Memory for the gradients that are needed, laid out alike whatever computes them."""
    of_heads = [empty_heads(tensor, tensor.size(2), tensor.size(1), tensor.size(3)) for tensor in tensors[:3]]
    others = [
        None if tensor is None else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor in tensors[3:_DIFFERENTIATED]
    ]
    return _needed((*of_heads, *others), needed)


def _needed(gradients: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor]:
    return [gradient for gradient, wanted in zip(gradients, needed, strict=True) if wanted]


def _save(ctx, inputs: tuple, output: Tensor) -> None:
    tensors = inputs[: len(BlockTensors._fields) + 1]  # the seed too
    ctx.save_for_backward(*tensors)
    ctx.settings = inputs[len(tensors) :]


def _differentiate(ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:_DIFFERENTIATED])
    gradients = iter(
        torch.ops.fairseq_lowrank.blocked_attention_backward(*ctx.saved_tensors, *ctx.settings, grad_output, needed)
    )
    others = len(ctx.needs_input_grad) - _DIFFERENTIATED
    return *(next(gradients) if wanted else None for wanted in needed), *[None] * others


def _refuse(ctx, *gradients) -> None:
    raise NotImplementedError(FIRST_ORDER)


torch.library.register_autograd("fairseq_lowrank::blocked_attention", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("fairseq_lowrank::blocked_attention_backward", _refuse, lib=_library)
