"""Questions about tensors of masks, whose answers are cached."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from fairseq_lowrank.ops.attention.tree import is_traced


def remember_last(question: Callable[[Tensor], bool]) -> Callable[[Tensor], bool]:
    """Cache the answer for the last tensor, unless it changes in place: all layers of a model receive the same mask.

    Reading a tensor on a GPU waits for it. So a GPU is asked once per mask, and never while a graph is captured or about a
    tensor of inference mode, whose changes cannot be seen. Then the answer is False: a mask that is not recognised costs time
    and changes no number. It is False too while tracing.
    """
    last: tuple[weakref.ref, int, bool] | None = None

    def ask(tensor: Tensor) -> bool:
        nonlocal last
        if is_traced(tensor):
            return False
        if tensor.is_inference():
            return not tensor.is_cuda and question(tensor)
        known = last
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        answer = question(tensor)
        last = (weakref.ref(tensor), tensor._version, answer)
        return answer

    return ask


@remember_last
def is_right_padding(key_padding_mask: Tensor) -> bool:
    """Return True if no row has a visible key after a hidden one.

    Under causality such padding hides nothing from real queries.
    """
    hidden = key_padding_mask.to(torch.bool)
    if hidden.size(1) == 0:
        return True
    # one question, since a GPU is waited for at each
    return not bool((hidden[:, 0] | (hidden[:, :-1] & ~hidden[:, 1:]).any(dim=1)).any())
