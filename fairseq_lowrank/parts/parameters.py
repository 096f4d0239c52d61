"""Parameters that an optimizer treats differently."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

APPLIES_TO_ALL_OPTIMIZERS = "under_any_optimizer"
"""Marks the ``optim_overrides`` of this package. Some models of fairseq have others, for its composite optimizer alone."""


def no_weight_decay(weight: Tensor) -> nn.Parameter:
    """Return a parameter that is exempt from weight decay, which would pull it towards 0."""
    parameter: Any = nn.Parameter(weight)
    parameter.optim_overrides = {"optimizer": {"weight_decay": 0.0}, APPLIES_TO_ALL_OPTIMIZERS: True}
    return parameter


class NoDecayModule(nn.Module):
    """A module whose parameters keep their ``optim_overrides`` in copies: ``copy.deepcopy`` of a parameter drops them."""

    def __getstate__(self) -> dict[str, Any]:
        overrides = {name: vars(parameter).get("optim_overrides") for name, parameter in self.named_parameters()}
        return {**self.__dict__, "optim_overrides": overrides}

    def __setstate__(self, state: dict[str, Any]) -> None:
        overrides = state.pop("optim_overrides", {})
        super().__setstate__(state)
        for name, parameter in self.named_parameters():
            if overrides.get(name) is not None:
                vars(parameter)["optim_overrides"] = copy.deepcopy(overrides[name])
