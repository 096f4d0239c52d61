"""Parameters that an optimizer treats differently."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

APPLIES_TO_ALL_OPTIMIZERS = "under_any_optimizer"
"""Marks the ``optim_overrides`` of this package. Some models of fairseq have others, for its composite optimizer alone."""


def no_weight_decay(weight: Tensor) -> nn.Parameter:
    """Return a parameter that is exempt from weight decay, which would pull it towards 0."""
    parameter = nn.Parameter(weight)
    exempt_from_decay(parameter)
    return parameter


def exempt_from_decay(parameter: nn.Parameter) -> None:
    """Exempt a parameter from weight decay in fairseq's optimizers, unless it has other settings."""
    settings = {"optimizer": {"weight_decay": 0.0}, APPLIES_TO_ALL_OPTIMIZERS: True}
    vars(parameter).setdefault("optim_overrides", settings)


@torch.no_grad()
def assign(tensor: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor. If the tensor is sharded, each worker gets its shard of the first worker's value."""
    if (mesh := getattr(tensor, "device_mesh", None)) is not None:
        from torch.distributed.tensor import distribute_tensor  # slow to import

        value = distribute_tensor(value.to(tensor.device, tensor.dtype), mesh, tensor.placements)  # type: ignore[attr-defined]
    tensor.copy_(value)


@contextlib.contextmanager
def wide_defaults() -> Iterator[None]:
    """Make new tensors float32 or wider, also while a model is built in half precision, as ``from_pretrained`` does."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


def _is_narrow(tensor: Tensor) -> bool:
    """Return True for floats of less than 32 bits."""
    return tensor.is_floating_point() and tensor.element_size() < 4


class NoDecayModule(nn.Module):
    """A module whose parameters keep their ``optim_overrides`` when torch replaces them.

    ``copy.deepcopy``, ``load_state_dict(assign=True)`` and ``to_empty`` make new parameters without them.

    Attributes:
        keeps_float32: the tensors are float32 or wider when a model around them is made half precision.
    """

    keeps_float32 = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NoDecayModule:
        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            narrowed = _is_narrow(result) and tensor.element_size() >= 4
            return tensor.to(result.device, torch.float32) if narrowed else result

        overrides = self._overrides()
        super()._apply(moved if self.keeps_float32 else fn, recurse)
        self._set_overrides(overrides)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.keeps_float32:  # assign=True takes the tensors of the state, also for the modules in this one
            for name, tensor in state_dict.items():
                if name.startswith(prefix) and isinstance(tensor, Tensor) and _is_narrow(tensor):
                    state_dict[name] = tensor.detach().to(torch.float32)
        overrides = self._overrides()
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._set_overrides(overrides)

    def _overrides(self) -> dict[str, Any]:
        return {name: vars(parameter).get("optim_overrides") for name, parameter in self.named_parameters()}

    def _set_overrides(self, overrides: dict[str, Any]) -> None:
        for name, parameter in self.named_parameters():
            if overrides.get(name) is not None:
                vars(parameter)["optim_overrides"] = overrides[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "optim_overrides": self._overrides()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        overrides = state.pop("optim_overrides", {})
        super().__setstate__(state)
        self._set_overrides(copy.deepcopy(overrides))
