"""Checks of a training that continues: it ends if it was finished, and must have the same batches within an epoch."""

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar

from fairseq import checkpoint_utils

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


PATIENCE = "validations_without_improvement"


def _stopping_rules() -> list[Callable]:
    """Return ``should_stop_early`` of fairseq-train, which is in ``__main__`` under ``python -m fairseq_cli.train``."""
    found = (getattr(sys.modules.get(name), "should_stop_early", None) for name in ("__main__", "fairseq_cli.train"))
    return [rule for rule in found if rule is not None]


# fairseq keeps the best value and the number of validations without improvement in its functions, so they belong to a process:
# the next run of a sweep continues to count, and a training that resumes starts to count again.
def count_patience_in_each_run(load: Callable) -> Callable:
    """Wrap ``Trainer.load_checkpoint``: begin with the best value and the patience of the checkpoint, or with none.

    A training that ``--patience`` stopped ends at once.
    """

    @functools.wraps(load)
    def load_checkpoint(
        self, filename, reset_optimizer=False, reset_lr_scheduler=False, optimizer_overrides=None, reset_meters=False
    ):
        for function in (checkpoint_utils.save_checkpoint, *_stopping_rules()):
            for name in ("best", "num_runs"):
                vars(function).pop(name, None)
        extra_state = load(self, filename, reset_optimizer, reset_lr_scheduler, optimizer_overrides, reset_meters)
        saved = (extra_state or {}).pop(PATIENCE, None)
        if saved and not reset_optimizer and not reset_meters:
            for rule in _stopping_rules():
                vars(rule).update(saved)
            limit = self.cfg.checkpoint.patience
            if 0 < limit <= saved["num_runs"]:
                logger.info(
                    f"nothing to train: the checkpoint has {saved['num_runs']} validations without improvement, and --patience "
                    f"is {limit}"
                )
                self.cfg.optimization.max_epoch = -1
        return extra_state

    return load_checkpoint


def save_patience(save: Callable) -> Callable:
    """Wrap ``Trainer.save_checkpoint``: save the best value and the patience that is used up."""

    @functools.wraps(save)
    def save_checkpoint(self, filename, extra_state):
        for rule in _stopping_rules():
            if "num_runs" in vars(rule):
                extra_state[PATIENCE] = {name: vars(rule)[name] for name in ("best", "num_runs")}
        return save(self, filename, extra_state)

    return save_checkpoint
