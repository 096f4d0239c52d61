"""Parameters with their own weight decay or learning rate, under any of fairseq's optimizers.

A parameter says so in its attribute ``optim_overrides = {"optimizer": {"weight_decay": 0.0, "lr_scale": 2.0}}``, the
attribute that fairseq's composite optimizer reads and that its half-precision optimizers carry over to their copies.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def overrides(parameter: nn.Parameter | None) -> dict[str, float]:
    """The optimizer settings that a parameter has of its own: none without a parameter."""
    return getattr(parameter, "optim_overrides", {}).get("optimizer", {})


def has_overrides(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether any parameter has settings of its own."""
    return any(overrides(parameter) for parameter in parameters)


def split_groups(optimizer: torch.optim.Optimizer) -> None:
    """Move parameters with settings of their own into groups that have those settings, one group a setting."""
    for group in list(optimizer.param_groups):
        own: dict[tuple, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            own.setdefault(tuple(sorted(overrides(parameter).items())), []).append(parameter)
        # The first group keeps its place even when empty: fairseq reads the learning rate from it.
        group["params"] = own.pop((), [])
        settings = {name: value for name, value in group.items() if name != "params"}
        for settings_of_own, parameters in own.items():
            optimizer.param_groups.append({**settings, **dict(settings_of_own), "params": parameters})
            scale_learning_rate(optimizer.param_groups[-1], settings["lr"])


def scale_learning_rate(group: dict, lr: float) -> None:
    """Set the learning rate of a group to ``lr`` times the ``lr_scale`` of its parameters.

    The parameters are asked, not the group: a resumed group has the settings of its checkpoint.
    """
    group["lr"] = lr * overrides(next(iter(group["params"]), None)).get("lr_scale", 1.0)
