"""Parameters with their own weight decay or learning rate, under any of fairseq's optimizers.

The settings are in the parameter's attribute ``optim_overrides = {"optimizer": {"weight_decay": 0.0, "lr_scale": 2.0},
"under_any_optimizer": True}``. fairseq's composite optimizer reads this attribute, and its half-precision optimizers copy it.
Settings without the mark ``under_any_optimizer`` belong to stock models, and are ignored here.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable

import omegaconf
import torch
from torch import Tensor, nn

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts.parameters import APPLIES_TO_ALL_OPTIMIZERS

COMPOSITE = "composite"
"""The optimizer of fairseq that has an optimizer and a schedule for each group of parameters."""


def overrides(parameter: Tensor | None) -> dict[str, float]:
    """Return the settings of a parameter that apply to all optimizers; empty if there are none or no parameter."""
    own = getattr(parameter, "optim_overrides", {})
    return own.get("optimizer", {}) if APPLIES_TO_ALL_OPTIMIZERS in own else {}


def has_overrides(parameters: Iterable[Tensor]) -> bool:
    """Return True if any parameter has separate settings."""
    return any(overrides(parameter) for parameter in parameters)


def split_groups(optimizer: torch.optim.Optimizer) -> None:
    """Move parameters with separate settings into groups, one group for each setting."""
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

    The scale is read from the parameters: a resumed group has the settings of its checkpoint.
    """
    group["lr"] = lr * overrides(next(iter(group["params"]), None)).get("lr_scale", 1.0)


# fairseq gives every parameter the same weight decay and learning rate. Its composite optimizer reads the settings of one
# parameter for the entire group, and half-precision copies are flattened into one tensor with one setting.
def build_with_overrides(build: Callable) -> Callable:
    """Wrap ``optim.build_optimizer``: every optimizer follows the ``optim_overrides`` of this package's parameters.

    Raises:
        UserError: the composite optimizer was chosen for such parameters.
    """

    @functools.wraps(build)
    def build_optimizer(cfg, params, *args, **kwargs):
        params = list(params)
        if not has_overrides(param for param in params if isinstance(param, Tensor)):
            return build(cfg, params, *args, **kwargs)
        # first: it fails in an assertion if parameters of one group have different settings
        if COMPOSITE in (cfg, getattr(cfg, "_name", None), getattr(cfg, "optimizer", None)):
            raise UserError(
                "--optimizer composite: does not work with head mixing or head embeddings, which have their own "
                "learning rate and weight decay. Use another optimizer."
            )
        optimizer = build(cfg, params, *args, **kwargs)
        split_groups(optimizer.optimizer)
        return optimizer

    return build_optimizer


def build_half_with_overrides(build: Callable) -> Callable:
    """Wrap ``FP16Optimizer.build_optimizer``: parameters with overrides are not flattened."""

    @functools.wraps(build)
    def build_optimizer(cls, cfg, params, **kwargs):
        params = list(params)
        if has_overrides(params):
            with omegaconf.open_dict(cfg):
                cfg.common.fp16_no_flatten_grads = True
        return build(cls, cfg, params, **kwargs)

    return build_optimizer


def set_scaled_lr(set_lr: Callable) -> Callable:
    """Wrap ``FairseqOptimizer.set_lr``: a group has the learning rate times its scale."""

    @functools.wraps(set_lr)
    def set_lr_of_groups(self, lr):
        for group in self.param_groups:
            scale_learning_rate(group, lr)

    return set_lr_of_groups


def load_with_overrides(load: Callable) -> Callable:
    """Wrap ``FairseqOptimizer.load_state_dict``: ``--optimizer-overrides`` keeps the separate settings of parameters."""

    @functools.wraps(load)
    def load_state_dict(self, state_dict, optimizer_overrides=None):
        load(self, state_dict, optimizer_overrides)
        for group in self.param_groups if optimizer_overrides else ():  # fairseq has applied them to every group
            group.update(overrides(next(iter(group["params"]), None)))
            if "lr" in optimizer_overrides:
                scale_learning_rate(group, optimizer_overrides["lr"])

    return load_state_dict


# fairseq's buffer has the dtype of the first parameter, in which gradients of parts in float32 would be rounded or infinite.
def reduce_each_dtype(all_reduce: Callable) -> Callable:
    """Wrap ``LegacyDistributedDataParallel.all_reduce_grads``: gradients are added up in their own dtype."""

    @functools.wraps(all_reduce)
    def all_reduce_grads(self):
        by_device = self.per_device_params
        sizes: Counter[torch.dtype] = Counter()
        for parameter in self.module.parameters():
            sizes[parameter.dtype] += parameter.numel()
        if self.accumulate_grads or len(sizes) == 1:
            all_reduce(self)
            return
        buffers = vars(self).setdefault("buffers_by_dtype", {})
        try:
            for dtype, size in sizes.items():
                self.per_device_params = [[one for one in every if one.dtype == dtype] for every in by_device]
                if dtype not in buffers:
                    first = next(self.module.parameters())
                    buffers[dtype] = first.new_empty(min(self.buffer_size, size), dtype=dtype)
                self.buffer = buffers[dtype]
                all_reduce(self)
        finally:
            self.per_device_params, self.buffer = by_device, None

    return all_reduce_grads
