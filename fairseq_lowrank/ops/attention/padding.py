"""Questions about the values of masks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from fairseq_lowrank.ops.attention.tree import hides_values


class _Pass(threading.local):
    """The answers of the forward pass of a model that runs in this thread; ``None`` outside of one."""

    def __init__(self) -> None:  # in each thread
        self.answers: dict[tuple[Callable, int], tuple[Tensor, bool]] | None = None


_pass = _Pass()


def begin_pass(*_: object) -> None:
    """Begin a forward pass in which masks do not change: each question about a tensor is answered once.

    All layers of a model get the same mask, and to read a tensor on a GPU is to wait for it. This is a forward pre-hook too.
    """
    _pass.answers = {}  # a pass that Ctrl-C interrupted has no end: PyTorch runs no hook after it


def end_pass(*_: object) -> None:
    """Forget the answers. This is a forward hook too."""
    _pass.answers = None


def about_values(question: Callable[[Tensor], bool]) -> Callable[[Tensor], bool]:
    """Answer a question about a mask with False if its values cannot be read, and once within a forward pass.

    A mask that is not recognised costs time and changes no number. Nothing is remembered beyond a pass: numpy, ``.data`` and
    shared memory change a tensor without a trace.
    """

    @functools.wraps(question)
    def ask(tensor: Tensor) -> bool:
        if hides_values(tensor) or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        if _pass.answers is None:
            return question(tensor)
        key = question, id(tensor)  # the tensor is kept with its answer, so no other one gets its number
        if key not in _pass.answers:
            _pass.answers[key] = tensor, question(tensor)
        return _pass.answers[key][1]

    return ask


@about_values
def is_right_padding(key_padding_mask: Tensor) -> bool:
    """Return True if no row has a visible key after a hidden one.

    Under causality such padding hides nothing from real queries.
    """
    hidden = key_padding_mask.to(torch.bool)
    if hidden.size(1) == 0:
        return True
    # one question, since a GPU is waited for at each
    return not bool((hidden[:, 0] | (hidden[:, :-1] & ~hidden[:, 1:]).any(dim=1)).any())
