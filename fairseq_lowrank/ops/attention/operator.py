"""The blocked backend as registered operators, for whatever looks at operations without running them.

``torch.compile`` and ``torch.export`` keep ``fairseq_lowrank::blocked_attention`` as one node, of any length, and on the
meta device it gives shapes. Running code does not come here: it spares itself the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_lowrank.ops.attention.blocked import FIRST_ORDER, attend, input_gradients
from fairseq_lowrank.ops.attention.parts import empty_heads, put_together

# The tensors of a call, which its layout puts together again: whatever parts there are, the operators are the same.
_INPUTS = "Tensor[] tensors, Tensor? seed, str layout, float[] numbers"

_library = torch.library.Library("fairseq_lowrank", "DEF")
_library.define(f"blocked_attention({_INPUTS}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_library.define(
    f"blocked_attention_backward({_INPUTS}, Tensor grad_output, bool[] needed) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


def _number(seed: Tensor | None) -> int:
    return 0 if seed is None else int(seed)


@torch.library.impl(_library, "blocked_attention", "CompositeExplicitAutograd")
def _forward(tensors: list[Tensor], seed: Tensor | None, layout: str, numbers: list[float]) -> Tensor:
    return attend(put_together(layout, tensors, numbers), _number(seed))


@torch.library.register_fake("fairseq_lowrank::blocked_attention", lib=_library)
def _forward_shapes(tensors: list[Tensor], seed: Tensor | None, layout: str, numbers: list[float]) -> Tensor:
    call = put_together(layout, tensors, numbers)
    _, heads, queries, _ = call.scores.shape
    return empty_heads(call.v, queries, heads, call.v.size(3))


@torch.library.impl(_library, "blocked_attention_backward", "CompositeExplicitAutograd")
def _backward(
    tensors: list[Tensor],
    seed: Tensor | None,
    layout: str,
    numbers: list[float],
    grad_output: Tensor,
    needed: Sequence[bool],
) -> list[Tensor]:
    pairs = zip(tensors, needed, strict=True)
    call = put_together(layout, [tensor.detach().requires_grad_(wanted) for tensor, wanted in pairs], numbers)
    gradients = input_gradients(call, _number(seed), grad_output)
    results = _empty_gradients(tensors, needed)
    for result, gradient in zip(results, _needed(gradients, needed), strict=True):
        result.copy_(gradient)
    return results


@torch.library.register_fake("fairseq_lowrank::blocked_attention_backward", lib=_library)
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
    """Memory for the gradients that are needed, laid out alike whatever computes them."""
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in _needed(tensors, needed)]


def _needed(tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor]:
    return [tensor for tensor, wanted in zip(tensors, needed, strict=True) if wanted]


def _save(ctx, inputs: tuple, output: Tensor) -> None:
    tensors, seed, *ctx.settings = inputs
    ctx.save_for_backward(*tensors, seed)


def _differentiate(ctx, grad_output: Tensor) -> tuple[list[Tensor | None], None, None, None]:
    needed = list(ctx.needs_input_grad[0])
    *tensors, seed = ctx.saved_tensors
    backward = torch.ops.fairseq_lowrank.blocked_attention_backward
    gradients = iter(backward(tensors, seed, *ctx.settings, grad_output, needed))
    return [next(gradients) if wanted else None for wanted in needed], None, None, None


def _refuse(ctx, *gradients) -> None:
    raise NotImplementedError(FIRST_ORDER)


torch.library.register_autograd("fairseq_lowrank::blocked_attention", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("fairseq_lowrank::blocked_attention_backward", _refuse, lib=_library)
