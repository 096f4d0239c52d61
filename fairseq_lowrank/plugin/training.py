"""``--train-only``: a training that freezes all parameters but some, and a learning rate of 0 that is scaled."""

import functools
import logging
from collections.abc import Callable

from torch import nn

from fairseq_lowrank.attention import train_only
from fairseq_lowrank.messages import FlagError

logger = logging.getLogger(__name__)


def train_chosen_parameters(init: Callable) -> Callable:
    """Wrap ``Trainer.__init__``, which collects the parameters that are trainable for the optimizer: freeze the others.

    Raises:
        FlagError: no parameter is chosen, or a frozen tensor would change. Or the learning rate is 0 and has a scale.
    """

    @functools.wraps(init)
    def __init__(self, cfg, task, model, criterion, *args, **kwargs):
        which, scale = (getattr(cfg.model, name, None) for name in ("train_only", "mixing_lr_scale"))
        if scale not in (None, 1) and not any(cfg.optimization.lr):
            reason = f"{scale:g} times 0 is 0, so nothing trains"
            raise FlagError(
                "--mixing-lr-scale", f"{scale:g} with --lr 0", reason, "Use --train-only mixing and a rate."
            )
        if which is not None:
            freeze(which, cfg, model, criterion)
        init(self, cfg, task, model, criterion, *args, **kwargs)

    return __init__


def freeze(which: str, cfg, model: nn.Module, criterion: nn.Module) -> None:
    """Freeze the parameters of a model and its criterion that a training does not choose."""
    if getattr(cfg.model, "quant_noise_pq", 0):
        raise FlagError("--train-only", which, "--quant-noise-pq changes frozen weights too", "Remove one of the two.")
    if kinds := [type(module) for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]:
        reason = f"{kinds[0].__name__} changes its statistics in training, also where it is frozen"
        raise FlagError("--train-only", which, reason, "Use another model.")
    criterion.requires_grad_(False)
    chosen = train_only(model, which)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    count = sum(sizes[name] for name in chosen)
    logger.info(
        f"--train-only {which}: {count:,} of {sum(sizes.values()):,} parameters train, in {len(chosen)} tensors"
    )
