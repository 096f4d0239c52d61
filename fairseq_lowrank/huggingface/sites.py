"""Where an attention module of a model of ``transformers`` attends, by its name and by the masks that are made around it.

No forward pass shows it: models take too many kinds of inputs, rebuild masks, and may be sharded before attention is chosen.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel

from fairseq_lowrank.parts import AXES, AttentionSpec

SITES = ("encoder", "decoder", "cross")

_CROSS = re.compile(
    r"cross_?att|encoder_?att|enc_?dec_?att|x_attn|token_to_image|image_to_token|\.cross", re.IGNORECASE
)
_CAUSAL_MASKS = frozenset(
    (
        "create_causal_mask",
        "create_sliding_window_causal_mask",
        "create_chunked_causal_mask",
        "create_masks_for_generate",
    )
)
_OTHER_MASKS = frozenset(("create_bidirectional_mask", "create_bidirectional_sliding_window_mask"))


def site_of(model: nn.Module, name: str) -> str:
    """Return where the module of this name attends: ``cross``, ``decoder`` (causal) or ``encoder``.

    The nearest module around it that makes masks decides if it makes masks of one kind for modules of this configuration.
    Otherwise flags of the module and of its configuration decide.
    """
    module = model.get_submodule(name)
    if _reads_another_sequence(module, name):
        return "cross"
    config = getattr(module, "config", None)
    parts = name.split(".")
    for end in range(len(parts), -1, -1):
        holder = model.get_submodule(".".join(parts[:end]))
        made = names_used(type(holder))  # type: ignore[arg-type]
        causal, other = bool(made & _CAUSAL_MASKS), bool(made & _OTHER_MASKS)
        if (causal or other) and config is not None and type(getattr(holder, "config", config)) is not type(config):
            break  # a model of images within a model of texts gets no mask of texts
        if causal != other:
            return "decoder" if causal else "encoder"
        if causal or (end < len(parts) and isinstance(holder, PreTrainedModel)):
            break  # masks that are made further up do not reach the module
    for source, flag in ((module, "is_decoder"), (module, "is_causal"), (config, "is_decoder")):
        if isinstance(value := getattr(source, flag, None), bool):
            return "decoder" if value else "encoder"
    return "encoder"


def _reads_another_sequence(module: nn.Module, name: str) -> bool:
    """Return True if a module reads keys of another sequence: its flag, its name, its class or its arguments say so."""
    if getattr(module, "is_cross_attention", False) or _CROSS.search(name):
        return True
    arguments = inspect.signature(module.forward).parameters
    return type(module).__name__.endswith("PoolingHead") or any(one.startswith("context") for one in arguments)


def has_sinks_already(module: nn.Module, spec: AttentionSpec) -> bool:
    """Return True if attention with sinks is chosen for a module that has its own."""
    return spec.attention_sinks != AXES["attention_sinks"].default and _has(module, "sink")


def caps_scores(module: nn.Module) -> bool:
    """Return True if a module caps its scores."""
    return _has(module, "softcap")


def _has(module: nn.Module, word: str) -> bool:
    """Return True if an attribute or parameter with this word in its name has a value."""
    values = vars(module) | dict(module.named_parameters(recurse=False))
    return any(word in name and value is not None for name, value in values.items())


def _own_functions(kind: type) -> dict[str, Callable]:
    """Return the functions that a class and its bases define, without those of torch and of ``PreTrainedModel``.

    Models may also be defined elsewhere: exported ones in this package, and others in code that their folder brings.
    """
    functions: dict[str, Callable] = {}
    for base in reversed(kind.__mro__):
        library = base.__module__.partition(".")[0] in ("builtins", "torch", "transformers")
        if not library or base.__module__.startswith("transformers.models."):
            functions |= {name: value for name, value in vars(base).items() if callable(value)}
    return functions


@functools.cache
def names_used(kind: type) -> frozenset[str]:
    """Return the global names and attributes that the methods of a class use."""
    codes = (getattr(inspect.unwrap(one), "__code__", None) for one in _own_functions(kind).values())
    return frozenset(name for code in codes if code is not None for name in code.co_names)
