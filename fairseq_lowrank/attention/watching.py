"""Functions that see or change the calls of attention modules, in one thread and while a context is open.

They are not attributes of a module: another thread that calls the same module computes unchanged calls. So does a backward pass that
computes them again in another thread, as on a GPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from fairseq_lowrank.ops import AttentionCall

Change = Callable[[AttentionCall], AttentionCall]
Receive = Callable[[Tensor], None]


class _Open(threading.local):
    """The functions of the open contexts of this thread, by module, from the outermost context."""

    def __init__(self) -> None:  # in each thread; compilers guard an attribute of the instance, not of the class
        self.changes: tuple[Mapping[nn.Module, Change], ...] = ()
        self.receivers: tuple[Mapping[nn.Module, Receive], ...] = ()


_open = _Open()


def changing_calls(functions: Mapping[nn.Module, Change]) -> contextlib.AbstractContextManager[None]:
    """Let each module compute ``function(call)`` in place of its call, in this thread and while the context is open."""
    return _opened("changes", functions)


def receiving_weights(functions: Mapping[nn.Module, Receive]) -> contextlib.AbstractContextManager[None]:
    """Call ``function(weights)`` with the weights of each call of a module, in this thread and while the context is open."""
    return _opened("receivers", functions)


@contextlib.contextmanager
def _opened(kind: str, functions: Mapping[nn.Module, Any]) -> Iterator[None]:
    setattr(_open, kind, (*getattr(_open, kind), functions))
    try:
        yield
    finally:  # contexts may end in another order than they began
        setattr(_open, kind, tuple(one for one in getattr(_open, kind) if one is not functions))


def changed_call(module: nn.Module, call: AttentionCall) -> AttentionCall:
    """Return the call that a module computes in this thread."""
    for functions in _open.changes:
        if module in functions:
            call = functions[module](call)
    return call


def receivers_of(module: nn.Module) -> list[Receive]:
    """Return the functions that get the weights of a module's calls in this thread."""
    return [functions[module] for functions in _open.receivers if module in functions]
