"""Refusals and warnings where a model with chosen attention would lose the choice."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin

from fairseq_lowrank.huggingface.function import IMPLEMENTATION
from fairseq_lowrank.messages import UserError

REMEDY = f'Call model.set_attn_implementation("{IMPLEMENTATION}"), or apply_attention(model, "mha") to remove the chosen attention.'


def refuse_exchange(module: nn.Module, args: object) -> None:
    """Hook before the forward pass of a module with chosen attention: refuse another attention function.

    Raises:
        UserError: the configuration of the module names another one.
    """
    name = getattr(getattr(module, "config", None), "_attn_implementation", IMPLEMENTATION)
    if name != IMPLEMENTATION:
        raise UserError(f"attention function {name!r} does not compute the chosen attention. {REMEDY}")


def guard(module: nn.Module, *, chosen: bool) -> None:
    """Let a module refuse other attention functions if its attention is chosen, and accept them otherwise."""
    for number, hook in list(module._forward_pre_hooks.items()):
        if hook is refuse_exchange:
            del module._forward_pre_hooks[number]
    if chosen:
        module.register_forward_pre_hook(refuse_exchange)


def has_choice(model: nn.Module) -> bool:
    """Return True if a module of a model has chosen attention."""
    return any(refuse_exchange in module._forward_pre_hooks.values() for module in model.modules())


# Continuous batching sets another attention function itself, and runs in another thread.
def _refuse_chosen_attention(init: Callable) -> Callable:
    @functools.wraps(init)
    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
        if has_choice(self):
            raise UserError(
                "continuous batching has its own attention functions, which do not compute the chosen attention. Use generate "
                'with another cache, or apply_attention(model, "mha") to remove the chosen attention.'
            )
        return init(self, *args, **kwargs)

    return init_continuous_batching


setattr(  # noqa: B010 (a method of another library)
    ContinuousMixin,
    "init_continuous_batching",
    _refuse_chosen_attention(ContinuousMixin.init_continuous_batching),
)
