"""What is added to an attention module of a model: one object, and the parts that are modules.

The parts are children of the attention module under the names of their axes, such as ``mixing``. So state dicts, optimizers and
adapters have them under these names.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from fairseq_lowrank.attention import AttentionConfig, AttentionSpec
from fairseq_lowrank.attention.core import Core
from fairseq_lowrank.huggingface.models import query_sizes
from fairseq_lowrank.huggingface.rotation import Rotation, chosen_rotation
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import MODULE_AXES, SLOTS, LayerPart
from fairseq_lowrank.parts import parts_of as children_on_axes
from fairseq_lowrank.parts.stages import declared

SLOT = "lowrank_attention"
"""The attribute of an attention module that holds its :class:`AddedAttention`."""

MARKER = "lowrank_attention_without_tensors"
"""A buffer of a module whose chosen attention has no tensors, so that a reader without this package reports an unexpected one."""

# Optimizers save their states by the position of a parameter, so this order never changes.
ADDED_AXES = tuple(sorted(MODULE_AXES, key=lambda axis: (not SLOTS[axis].fields, SLOTS[axis].fields)))
"""The axes whose parts are children of an attention module, in the order of its parameters."""


class AddedAttention(NamedTuple):
    """The attention that is chosen for one module.

    It never changes, and holds nothing of a call.

    Args:
        core: runs the parts, which are children of the module.
        inputs: the name of the module's first argument.
        causal: whether the module is causal; ``None`` if its flag ``is_causal`` says it.
        rotation: of queries, which is undone before parts read them; ``None`` if there is nothing to undo.
    """

    core: Core
    inputs: str = "hidden_states"
    causal: bool | None = None
    rotation: Rotation | None = None

    @property
    def config(self) -> AttentionConfig | None:
        """For which the parts were built; ``None`` without parts."""
        return self.core.config


class _Call(NamedTuple):
    """The call of an attention module, with its input and its cache.

    They are weak references, because a call that fails does not end here: its inputs would keep the graph of all layers before.
    """

    module: Any
    inputs: Any
    cache: Any
    positions: tuple[Any, ...]

    @classmethod
    def of(
        cls, module: nn.Module, inputs: Tensor | None, cache: Cache | None, positions: tuple[Tensor, ...] = ()
    ) -> _Call:
        return cls(_weak(module), _weak(inputs), _weak(cache), tuple(_weak(one) for one in positions))


def _weak(value: Any) -> Any:
    """Return a weak reference. While a compiler traces a call, which it cannot do with references, return the value."""
    return value if value is None or torch.compiler.is_compiling() else weakref.ref(value)


def _strong(value: Any) -> Any:
    """Return what :func:`_weak` was given, or None if nothing else keeps it."""
    return value() if isinstance(value, weakref.ref) else value


class _Calls(threading.local):
    """The calls of attention modules that run in this thread, from the outermost."""

    def __init__(self) -> None:  # in each thread; compilers guard an attribute of the instance, not of the class
        self.running: tuple[_Call, ...] = ()


_calls = _Calls()


def inputs_of(module: nn.Module) -> Tensor | None:
    """Return the input ``[B, T, embed_dim]`` of the call of a module that runs now, if its parts read it.

    The attention function gets projected tensors only.
    """
    return next((_strong(call.inputs) for call in _calls.running if _strong(call.module) is module), None)


def mixing_queries_of(module: nn.Module, queries: Tensor) -> Tensor:
    """Return the queries that parts of a module read in its call that runs now: those before rotary positions."""
    rotation = added_to(module).rotation
    if rotation is None:
        return queries
    cos, sin = next(call.positions for call in _calls.running if _strong(call.module) is module)
    return rotation.undone(queries, _strong(cos), _strong(sin))


def first_position(module: nn.Module, queries: int, keys: int) -> int | Tensor:
    """Return the number of keys before the first query in the call of a module that runs now, if its parts read positions.

    Slots of a static cache after the last query are empty. The first layer of a cache counts positions for all layers.
    """
    cache = next((_strong(call.cache) for call in _calls.running if _strong(call.module) is module), None)
    filled = keys if cache is None else cache.get_seq_length()
    return (filled.clamp(max=keys) if isinstance(filled, Tensor) else min(filled, keys)) - queries


def added_to(module: nn.Module) -> AddedAttention:
    """Return what is added to an attention module.

    Raises:
        UserError: nothing is added, which a model from ``from_pretrained`` shows in its first call, and a model whose
            configuration object another model has too, or a part of it.
    """
    if (added := vars(module).get(SLOT)) is None:
        folder = getattr(getattr(module, "config", None), "name_or_path", "")
        folder = "FOLDER" if folder in ("", "None") else folder  # transformers writes "None" without a folder
        raise UserError(
            f"{type(module).__name__} has no mixing: from_pretrained does not load it, and a model with the same configuration object "
            f'does not share it. Call load_attention(model, "{folder}"), build the model from a copy of its configuration, or call '
            'model.set_attn_implementation("sdpa") to leave the mixing out. If you chose attention for a part of the model alone, such '
            "as its decoder, call apply_attention on the whole model with sites= or layers=."
        )
    return added


def parts_of(module: nn.Module) -> dict[str, Any]:
    """Return the parts that are added to a module, by axis; another library may have wrapped them."""
    if SLOT not in vars(module):
        return {}
    parts = children_on_axes(module)
    return {axis: parts[axis] for axis in ADDED_AXES if axis in parts}


def added_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters that are added to an attention module."""
    for part in parts_of(module).values():
        yield from part.parameters()


def part_tensors(parts: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the tensors of parts by axis, by their names in the state dict of an attention module."""
    return {
        f"{axis}.{name}": tensor
        for axis, part in parts.items()
        for name, tensor in (*part.named_parameters(), *part.named_buffers())
    }


def mixing_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that are added to a module, by their names in the module's state dict."""
    return part_tensors(parts_of(module))


def renamed_tensors(module: nn.Module) -> list[str]:
    """Return the tensors that are added to a module under names that its parts do not have, such as those of pruning."""
    added = vars(module).get(SLOT)
    if added is None or added.config is None:
        return []
    with torch.device("meta"):
        parts = {axis: part for axis in ADDED_AXES if (part := added.config.build(axis)) is not None}
    return sorted(mixing_tensors(module).keys() - part_tensors(parts).keys())


def mixing_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of the mixing, by their names in the model's state dict."""
    return {
        f"{name}.{key}": tensor
        for name, module in model.named_modules()
        for key, tensor in mixing_tensors(module).items()
    }


def build_added(
    module: nn.Module, spec: AttentionSpec, causal: bool | None = None, mixing_queries: str = "unrotated"
) -> tuple[AddedAttention, dict[str, LayerPart]]:
    """Return what :func:`add` gives to an attention module for ``spec``, and its parts. The module does not change.

    Args:
        causal: see :class:`AddedAttention`.
        mixing_queries: one of :data:`~.rotation.MIXING_QUERIES`.

    Raises:
        UserError: a part reads queries that the module rotates in a way that cannot be undone.
    """
    config = query_sizes(module, spec)
    built = {} if config is None else {axis: config.build(axis) for axis in ADDED_AXES}
    parts = {axis: _placed(part, module) for axis, part in built.items() if part is not None}
    inputs = list(inspect.signature(type(module).forward).parameters)[1]
    rotation = chosen_rotation(module, parts.values(), config.head_dim, mixing_queries) if config and parts else None
    return AddedAttention(Core(spec, config if parts else None), inputs, causal, rotation), parts


def add(module: nn.Module, added: AddedAttention, parts: Mapping[str, nn.Module], *, chosen: bool = False) -> None:
    """Give an attention module what :func:`build_added` built, in place of what an earlier call added.

    Args:
        chosen: the attention is another one than the module's own.
    """
    for axis in parts_of(module):
        delattr(module, axis)
    module._buffers.pop(MARKER, None)
    if chosen and not part_tensors(parts):
        module.register_buffer(MARKER, torch.zeros(1))
    for axis, part in parts.items():
        setattr(module, axis, part)
    hooked = _hand_over in module._forward_pre_hooks.values()
    if not hooked and (added.rotation is not None or any(_reads_call(part) for part in parts.values())):
        module.register_forward_pre_hook(_hand_over, with_kwargs=True)
        module.register_forward_hook(_forget)
    vars(module)[SLOT] = added


def _placed(part: LayerPart, module: nn.Module) -> LayerPart:
    """Put a part on the module's device and in its mode, in float32, or float64 where the module is.

    The device is where the module computes: weights on a disk are loaded there at each call.
    """
    tensors = [*module.parameters(), *module.buffers()]
    hooks = (getattr(child, "_hf_hook", None) for child in module.modules())
    device = next((place for hook in hooks if (place := getattr(hook, "execution_device", None)) is not None), None)
    if device is None:
        device = tensors[0].device if tensors else torch.device("cpu")
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return part.to(device, torch.float64 if wide else torch.float32).train(module.training)


def _reads_call(part: Any) -> bool:
    """Return True if a part reads what the attention function does not get: inputs, or positions in a cache."""
    return part.reads_inputs or part.reads_own_value or part.reads_positions


def _hand_over(module: nn.Module, args: tuple, kwargs: dict) -> None:
    added = added_to(module)
    declarations = [declared(part) for part in parts_of(module).values()]
    if added.rotation is None and not any(_reads_call(part) for part in declarations):
        return  # the parts of an earlier choice did
    inputs = None
    if any(part.reads_inputs for part in declarations):
        inputs = args[0] if args else kwargs[added.inputs]
    if inputs is not None and added.config is not None and added.config.embed_dim != inputs.size(-1):
        raise UserError(
            f"{type(module).__name__} reads inputs of size {inputs.size(-1)}, and its attention was chosen for "
            f"{added.config.embed_dim}. Leave this layer out with layers= or sites=, or choose mixing that reads no inputs."
        )
    # models name the argument past_key_values, past_key_value or layer_past
    cache = next((given for given in (*args, *kwargs.values()) if isinstance(given, Cache)), None)
    positions = ()
    if added.rotation is not None:
        given = kwargs.get("position_embeddings")
        positions = args[added.rotation.argument] if given is None else given
    _calls.running = (*_calls_around(module), _Call.of(module, inputs, cache, positions))


def _forget(module: nn.Module, args: tuple, output: object) -> None:
    _calls.running = _calls_around(module)


# A hook that also runs after an exception would have another number in each module, which compilers guard. So the next call
# of the module replaces what an exception left.
def _calls_around(module: nn.Module) -> tuple[_Call, ...]:
    """Return the calls that began before that of a module."""
    for index, call in enumerate(_calls.running):
        if _strong(call.module) is module:
            return _calls.running[:index]
    return _calls.running
