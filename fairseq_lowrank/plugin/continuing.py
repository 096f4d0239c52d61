"""Checks of a training that continues: it ends if it was finished, and must have the same batches within an epoch."""

import functools
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar

from fairseq_lowrank.messages import UserError

logger = logging.getLogger(__name__)

MAKING_BATCHES = {
    "--distributed-world-size": ("distributed_training", "distributed_world_size"),
    "--max-tokens": ("dataset", "max_tokens"),
    "--batch-size": ("dataset", "batch_size"),
    "--required-batch-size-multiple": ("dataset", "required_batch_size_multiple"),
    "--train-subset": ("dataset", "train_subset"),
    "--seed": ("common", "seed"),
    "--tokens-per-sample": ("task", "tokens_per_sample"),
    "--sample-break-mode": ("task", "sample_break_mode"),
}
"""The flags that decide the sentences of each batch and the order of batches, with their place in a configuration."""

SETTINGS = "settings_of_batches"
_continuing: ContextVar[bool] = ContextVar("a trainer loads a checkpoint", default=False)


def settings_of_batches(cfg: Mapping) -> dict[str, object]:
    """Return the values of :data:`MAKING_BATCHES` that a configuration has."""
    found = {}
    for flag, (section, name) in MAKING_BATCHES.items():
        part = cfg.get(section)
        values = part if isinstance(part, Mapping) or part is None else vars(part)
        if values and name in values:
            found[flag] = values[name]
    return found


# A trainer drops the configuration of a checkpoint, and one worker loads it for all.
def keep_settings(load: Callable) -> Callable:
    """Wrap ``load_checkpoint_to_cpu``: add the flags that made the batches to the state that a trainer loads."""

    @functools.wraps(load)
    def load_checkpoint_to_cpu(path, *args, **kwargs):
        state = load(path, *args, **kwargs)
        if _continuing.get() and state.get("cfg") is not None and isinstance(state.get("extra_state"), dict):
            state["extra_state"][SETTINGS] = settings_of_batches(state["cfg"])
        return state

    return load_checkpoint_to_cpu


# A position within an epoch is a number of batches. With other batches, sentences are left out or trained twice.
def refuse_other_batches(load: Callable) -> Callable:
    """Wrap ``Trainer.load_checkpoint``: in the middle of an epoch, refuse other flags that make batches.

    Raises:
        UserError: a flag differs.
    """

    @functools.wraps(load)
    def load_checkpoint(self, filename, *args, **kwargs):
        token = _continuing.set(True)
        try:
            extra_state = load(self, filename, *args, **kwargs)
        finally:
            _continuing.reset(token)
        saved = extra_state.pop(SETTINGS, {}) if extra_state else {}
        checkpoint = self.cfg.checkpoint
        from_the_start = checkpoint.reset_dataloader or filename == checkpoint.finetune_from_model
        if saved and not from_the_start and extra_state["train_iterator"].get("iterations_in_epoch", 0) > 0:
            present = settings_of_batches(self.cfg)
            for flag, value in saved.items():
                if present.get(flag) != value:
                    raise UserError(
                        f"{flag} {present.get(flag)}: {filename} is in the middle of an epoch whose batches were made with "
                        f"{flag} {value}. Use that value, or add --reset-dataloader to start with epoch 1."
                    )
        return extra_state

    return load_checkpoint


# fairseq checks --max-update only after an update. It reads --max-epoch after this function, and no epoch is below 0.
def end_if_finished(load: Callable) -> Callable:
    """Wrap ``Trainer.load_checkpoint``: end at once if the checkpoint has reached ``--max-update``."""

    @functools.wraps(load)
    def load_checkpoint(self, *args, **kwargs):
        extra_state = load(self, *args, **kwargs)
        limit, updates = self.cfg.optimization.max_update, self.get_num_updates()
        if 0 < limit <= updates:
            logger.info(f"nothing to train: the checkpoint has {updates} updates, and --max-update is {limit}")
            self.cfg.optimization.max_epoch = -1
        return extra_state

    return load_checkpoint
