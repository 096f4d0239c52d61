"""Functions that see or change the calls of attention modules, in one thread and while a context is open.

They are not attributes of a module: another thread that calls the same module computes unchanged calls. So does a backward pass that
computes them again in another thread, as on a GPU. Regularisers alone belong to a backward pass too, in whichever thread it runs.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.ops import AttentionCall


class RegularizerInput(NamedTuple):
    """A forward pass of a layer, for its regulariser, which returns the heads to continue with.

    Args:
        layer: the layer.
        call: what was computed.
        heads: ``[B, H, T, .]``, the result.
        query_padding: ``[B, T]`` bool, true at queries that are padding; ``None`` also in cross attention, which does not know it.
    """

    layer: Any
    call: AttentionCall
    heads: Tensor
    query_padding: Tensor | None


Change = Callable[[AttentionCall], AttentionCall]
Receive = Callable[[Tensor], None]
Regularise = Callable[[RegularizerInput], Tensor]


class _Open(threading.local):
    """The functions of the open contexts of this thread, by module, from the outermost context."""

    def __init__(self) -> None:  # in each thread; compilers guard an attribute of the instance, not of the class
        self.changes: tuple[Mapping[nn.Module, Change], ...] = ()
        self.receivers: tuple[Mapping[nn.Module, Receive], ...] = ()
        self.regularisers: tuple[Mapping[nn.Module, Regularise], ...] = ()


_open = _Open()
_recomputed: weakref.WeakValueDictionary[int, ChainMap[nn.Module, Regularise]] = weakref.WeakValueDictionary()
"""The regularisers of backward passes, by the number of the pass."""


def changing_calls(functions: Mapping[nn.Module, Change]) -> contextlib.AbstractContextManager[None]:
    """Let each module compute ``function(call)`` in place of its call, in this thread and while the context is open."""
    return _opened("changes", functions)


def receiving_weights(functions: Mapping[nn.Module, Receive]) -> contextlib.AbstractContextManager[None]:
    """Call ``function(weights)`` with the weights of each call of a module, in this thread and while the context is open."""
    return _opened("receivers", functions)


def regularising(functions: Mapping[nn.Module, Regularise]) -> contextlib.AbstractContextManager[None]:
    """Let each module continue with the heads that ``function(input)`` returns, in this thread and while the context is open."""
    return _opened("regularisers", functions)


def regularise_recomputed(functions: Mapping[nn.Module, Regularise]) -> object:
    """Let modules that the running backward pass computes again continue with the heads that their functions return.

    Returns:
        The owner of this choice: the functions are used while the caller keeps it.
    """
    running = torch._C._current_graph_task_id()
    earlier = _recomputed.get(running)
    _recomputed[running] = owner = ChainMap(dict(functions), *([] if earlier is None else earlier.maps))
    return owner


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


def regulariser_of(module: nn.Module) -> Regularise | None:
    """Return the function that gets the heads of a module's calls in this thread or in the running backward pass.

    Raises:
        UserError: the backward pass belongs to two forward passes, and computes the module again for one of them.
    """
    for functions in reversed(_open.regularisers):
        if module in functions:
            return functions[module]
    if torch.compiler.is_compiling() or not _recomputed:
        return None
    of_backward = _recomputed.get(torch._C._current_graph_task_id(), ChainMap())
    found = [functions[module] for functions in of_backward.maps if module in functions]
    if len(found) > 1:
        raise UserError(
            "penalties with activation checkpointing: one backward pass of two losses of a model. "
            "Call backward() for each loss, or remove --checkpoint-activations."
        )
    return found[0] if found else None
