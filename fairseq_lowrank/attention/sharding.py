"""Layers whose parameters ``fully_shard`` splits over workers."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import LayerPart

Model = TypeVar("Model", bound=nn.Module)


def shard_parts(model: Model, **options: Any) -> Model:
    """Call ``fully_shard`` for each part of a model's attention, such as mixing, and return the model.

    Call it before ``fully_shard`` of layers and model. Parts are in float32, also in a half-precision model, and a group of
    ``fully_shard`` has one dtype. A part is gathered when it runs, and kept until the backward pass.

    Args:
        model: a model with layers of this package, or one with :func:`~fairseq_lowrank.huggingface.apply_attention`.
        options: of ``fully_shard``, such as ``mesh``. Without ``mp_policy``, parts compute in float32.

    Raises:
        UserError: a part is sharded already.
    """
    from torch.distributed.fsdp import fully_shard  # slow to import

    parts = [module for module in model.modules() if isinstance(module, LayerPart) and [*module.parameters()]]
    for part in parts:
        if is_sharded(part):
            raise UserError(f"{type(part).__name__} is sharded already. Call shard_parts before fully_shard.")
    for part in parts:
        fully_shard(part, reshard_after_forward=False, **options)
    return model


def is_sharded(model: nn.Module) -> bool:
    """Return True if a parameter of a model is split over workers."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the values of all workers; each of them calls this if the tensor is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model, sharded or not, with whole tensors on the CPU. Every worker calls it.

    It keeps the configuration of attention, which ``torch.distributed.checkpoint.state_dict`` drops.
    """
    state = model.state_dict()
    for name, tensor in state.items():
        state[name] = whole(tensor).detach().cpu()
    return state
