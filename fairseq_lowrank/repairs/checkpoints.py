"""Repairs of saving checkpoints and of loading some layers of a checkpoint."""

import contextlib
import functools
import re

from fairseq import checkpoint_utils
from omegaconf import DictConfig, open_dict

from fairseq_lowrank.repairs.patch import Patch


class _WithinEpoch:
    """The batches of an epoch that never report its end."""

    def __init__(self, batches):
        self._batches = batches

    def __getattr__(self, name):
        return getattr(self._batches, name)

    def end_of_epoch(self) -> bool:
        return False


def save_interval_at_end_of_epoch(save):
    """Return a ``save_checkpoint`` that writes a due update checkpoint on the last batch of an epoch."""

    @functools.wraps(save)
    def save_checkpoint(cfg, trainer, epoch_itr, val_loss):
        due = cfg.save_interval_updates > 0 and trainer.get_num_updates() % cfg.save_interval_updates == 0
        if due and epoch_itr.end_of_epoch():
            writes_epoch = not cfg.no_epoch_checkpoints and epoch_itr.epoch % cfg.save_interval == 0
            epoch_itr = epoch_itr if writes_epoch else _WithinEpoch(epoch_itr)
        return save(cfg, trainer, epoch_itr, val_loss)

    return save_checkpoint


# fairseq compares a new value with the worst saved one, even if fewer than K are saved. The value of an imagined worst
# checkpoint lets every value pass. fairseq deletes only what is after the first K, so it never deletes the imagined one.
def keep_best_checkpoints(save):
    """Return a ``save_checkpoint`` that keeps the best K checkpoints, negative values included."""

    @functools.wraps(save)
    def save_checkpoint(cfg, trainer, epoch_itr, val_loss):
        find = checkpoint_utils.checkpoint_paths
        if cfg.keep_best_checkpoints <= 0:
            return save(cfg, trainer, epoch_itr, val_loss)

        def checkpoint_paths(path, pattern, **options):
            if not pattern.startswith(r"checkpoint\.best_"):
                return find(path, pattern, **options)
            paths = find(path, pattern.replace(r"(\d+", r"(-?\d+"), **options)
            if len(paths) < cfg.keep_best_checkpoints:  # in descending order
                end = f"{trainer.checkpoint_suffix}.pt"
                paths = [*paths, f"_-inf{end}"] if cfg.maximize_best_checkpoint_metric else [f"_inf{end}", *paths]
            return paths

        checkpoint_utils.checkpoint_paths = checkpoint_paths
        try:
            return save(cfg, trainer, epoch_itr, val_loss)
        finally:
            checkpoint_utils.checkpoint_paths = find

    return save_checkpoint


def keep_layers_of_other_side(prune):
    """Return a ``prune_state_dict`` that keeps every layer of a side whose layers to keep are not given."""

    @functools.wraps(prune)
    def prune_state_dict(state_dict, model_cfg):
        kept = {side: getattr(model_cfg, f"{side}_layers_to_keep", None) for side in ("encoder", "decoder")}
        others = [side for side in kept if not kept[side]]
        if len(others) != 1:
            return prune(state_dict, model_cfg)
        layer = re.compile(rf"{others[0]}.*\.layers\.(\d+)\.")
        layers = {match[1] for name in state_dict if (match := layer.match(name))}
        if not layers:  # the model has one side
            return prune(state_dict, model_cfg)
        option = f"{others[0]}_layers_to_keep"
        with open_dict(model_cfg) if isinstance(model_cfg, DictConfig) else contextlib.nullcontext():
            setattr(model_cfg, option, ",".join(sorted(layers)))
            try:
                return prune(state_dict, model_cfg)
            finally:
                setattr(model_cfg, option, None)

    return prune_state_dict


PATCHES = (
    Patch(
        name="last-interval-checkpoint",
        target="fairseq.checkpoint_utils.save_checkpoint",
        wrap=save_interval_at_end_of_epoch,
        reason="On the last batch of an epoch, --save-interval-updates with --no-epoch-checkpoints writes no checkpoint.",
        remove_when="fairseq writes the checkpoint of an update that ends an epoch",
        group="fix",
    ),
    Patch(
        name="best-checkpoints",
        target="fairseq.checkpoint_utils.save_checkpoint",
        wrap=keep_best_checkpoints,
        reason="--keep-best-checkpoints K saves only improvements, and never deletes a checkpoint with a negative value.",
        remove_when="fairseq saves the best K values and its pattern matches negative ones",
        group="fix",
    ),
    Patch(
        name="one-sided-layers",
        target="fairseq.checkpoint_utils.prune_state_dict",
        wrap=keep_layers_of_other_side,
        reason="With layers to keep for one side, fairseq drops every layer of the other side.",
        remove_when="fairseq prunes only the side whose layers to keep are given",
        group="fix",
    ),
)
