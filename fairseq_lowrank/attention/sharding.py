"""Layers whose parameters ``fully_shard`` splits over workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from fairseq_lowrank.importing import after_import
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


_GROUPS = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def _watch_groups() -> None:
    """Wrap where ``fully_shard`` finds that the parameters of a group have several dtypes."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    group: Any = _fsdp_param_group.FSDPParamGroup
    if hasattr(group, "_init_mp_dtypes"):
        group._init_mp_dtypes = _name_shard_parts(group._init_mp_dtypes)


def _name_shard_parts(check: Callable) -> Callable:
    @functools.wraps(check)
    def _init_mp_dtypes(self: Any) -> None:
        try:
            check(self)
        except AssertionError as error:
            holders = (getattr(getattr(param, "_module_info", None), "module", None) for param in self.fsdp_params)
            parts = [holder for holder in holders if isinstance(holder, LayerPart)]
            if not parts:
                raise
            raise UserError(
                f"{type(parts[0]).__name__} is in float32, and its group of fully_shard has parameters of another dtype. Call "
                "shard_parts(model) before fully_shard."
            ) from error

    return _init_mp_dtypes


after_import(_GROUPS, _watch_groups)
