"""What is added to an attention module of a model: mixing, output and activation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fairseq_lowrank.attention.spec import AttentionSpec
from fairseq_lowrank.huggingface.models import query_sizes
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts.parameters import NoDecayModule

MODULES = ("mixing", "score_mixing", "head_output")
"""The names of the modules that are added to an attention module."""


def added_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters that are added to an attention module."""
    for added in added_modules(module):
        yield from added.parameters()


def added_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules that are added to an attention module; another library may have wrapped them."""
    if "attention_activation" not in vars(module):
        return []
    return [added for name in MODULES if (added := module._modules.get(name)) is not None]


def add_modules(module: Any, spec: AttentionSpec) -> None:
    """Add mixing, output and activation of ``spec`` to one attention module."""
    dims = query_sizes(module)
    assert dims is not None
    for name in MODULES:
        setattr(module, name, _placed(spec.build(name, dims), module))
    module.attention_activation = spec.activation
    mixings = (module.mixing, module.score_mixing)
    if module.head_output is not None or any(mixing is not None and mixing.reads_inputs for mixing in mixings):
        # the attention function gets projected tensors only, and these modules read the input of the layer
        module.attention_inputs_hooks = (
            module.register_forward_pre_hook(_remember_inputs, with_kwargs=True),
            module.register_forward_hook(_forget_inputs, always_call=True),
        )


def _placed(added: NoDecayModule | None, module: nn.Module) -> NoDecayModule | None:
    """Put what is added to a module on the module's device, in float32, or float64 where the module is.

    The device is where the module computes: weights on a disk are loaded there at each call.
    """
    if added is None:
        return None
    tensors = [*module.parameters(), *module.buffers()]
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    device = next((place for hook in hooks if (place := getattr(hook, "execution_device", None)) is not None), None)
    if device is None:
        device = tensors[0].device if tensors else torch.device("cpu")
    added.to(device, torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32)
    added.keeps_float32 = True
    return added


def _remember_inputs(module: Any, args: tuple, kwargs: dict) -> None:
    inputs = args[0] if args else kwargs[_first_argument(type(module))]  # type: ignore[arg-type]
    dims = query_sizes(module)
    if dims is not None and (width := dims.embed_dim) != inputs.size(-1):
        raise UserError(
            f"{type(module).__name__} reads inputs of size {inputs.size(-1)}, and its attention was chosen for {width}. "
            "Leave this layer out with layers= or sites=, or choose mixing that reads no inputs."
        )
    module.attention_inputs = inputs


@functools.cache
def _first_argument(kind: type[nn.Module]) -> str:
    return list(inspect.signature(kind.forward).parameters)[1]


def _forget_inputs(module: nn.Module, args: tuple, output: object) -> None:
    """Keep nothing of a call: its tensors would stay in copies and in files of the model."""
    vars(module).pop("attention_inputs", None)


def mixing_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of the mixing, by their names in the model's state dict."""
    state: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if "attention_activation" in vars(module):
            state |= {f"{name}.{key}": tensor for key, tensor in mixing_tensors(module).items()}
    return state


def mixing_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module's mixing, by their names in the module's state dict."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in MODULES:
            if (added := getattr(module, name, None)) is not None:
                yield from ((f"{name}.{key}", t) for key, t in (*added.named_parameters(), *added.named_buffers()))

    return dict(tensors())
