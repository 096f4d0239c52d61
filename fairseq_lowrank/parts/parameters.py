"""Parameters that an optimizer treats differently."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

APPLIES_TO_ALL_OPTIMIZERS = "under_any_optimizer"
"""Marks the ``optim_overrides`` of this package. Some models of fairseq have others, for its composite optimizer alone."""


def no_weight_decay(weight: Tensor) -> nn.Parameter:
    """Return a parameter that is exempt from weight decay, which would pull it towards 0."""
    parameter: Any = nn.Parameter(weight)
    parameter.optim_overrides = {"optimizer": {"weight_decay": 0.0}, APPLIES_TO_ALL_OPTIMIZERS: True}
    return parameter


class NoDecayModule(nn.Module):
    """A module whose parameters keep their ``optim_overrides`` in copies: ``copy.deepcopy`` of a parameter drops them.

    Attributes:
        keeps_float32: the tensors stay in float32 when a model around them is made half precision. A step of 1e-3 is lost
            in a bfloat16 number near 1.
    """

    keeps_float32 = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NoDecayModule:
        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            narrow = result.is_floating_point() and result.element_size() < tensor.element_size()
            return tensor.to(result.device) if narrow and tensor.dtype == torch.float32 else result

        return super()._apply(moved if self.keeps_float32 else fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        overrides = {name: vars(parameter).get("optim_overrides") for name, parameter in self.named_parameters()}
        return {**self.__dict__, "optim_overrides": overrides}

    def __setstate__(self, state: dict[str, Any]) -> None:
        overrides = state.pop("optim_overrides", {})
        super().__setstate__(state)
        for name, parameter in self.named_parameters():
            if overrides.get(name) is not None:
                vars(parameter)["optim_overrides"] = copy.deepcopy(overrides[name])
