"""Checks of a training that continues: it ends if it was finished, and must have the same batches within an epoch."""

import functools
import hashlib
import logging
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar

import numpy
from fairseq import checkpoint_utils
from fairseq.data.iterators import EpochBatchIterator
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule

from fairseq_lowrank.messages import UserError

logger = logging.getLogger(__name__)

MAKING_BATCHES = {
    "--distributed-world-size": ("distributed_training", "distributed_world_size"),
    "--max-tokens": ("dataset", "max_tokens"),
    "--batch-size": ("dataset", "batch_size"),
    "--required-batch-size-multiple": ("dataset", "required_batch_size_multiple"),
    "--train-subset": ("dataset", "train_subset"),
    "--skip-remainder-batch": ("optimization", "skip_remainder_batch"),
    "--seed": ("common", "seed"),
    "--tokens-per-sample": ("task", "tokens_per_sample"),
    "--sample-break-mode": ("task", "sample_break_mode"),
}
"""The flags that decide the sentences of each batch and the order of batches, with their place in a configuration."""
LIMITS = {
    name: ("model", name.removeprefix("--").replace("-", "_"))
    for name in ("--max-source-positions", "--max-target-positions")
}
"""Flags that may leave out sentences."""
DATA = {"the data folder": ("task", "data")}

SETTINGS = "settings_of_batches"
BATCHES = "remaining_batches"
BEGINNING = "first_batch_of_process"
"""The attribute of an iterator that maps its epoch to the position at which it resumed."""
_continuing: ContextVar[bool] = ContextVar("a trainer loads a checkpoint", default=False)


def settings_of_batches(cfg: Mapping) -> dict[str, object]:
    """Return the settings that a configuration has and that may change batches."""
    found = {}
    for flag, (section, name) in (MAKING_BATCHES | LIMITS | DATA).items():
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


class OtherBatches(UserError):
    """The batches that remain of an epoch are not those of the checkpoint.

    Args:
        path: the checkpoint.
        changes: each setting that may be the cause, with its value in the checkpoint and now.
    """

    def __init__(
        self, path: str = "the checkpoint", changes: Mapping[str, tuple[object, object]] | None = None
    ) -> None:
        super().__init__(path, changes)
        self.path, self.changes = path, changes or {}

    def __str__(self) -> str:
        now = "; ".join(f"{name} {present} (there: {saved})" for name, (saved, present) in self.changes.items())
        return (
            f"{now or 'the data has changed'}: {self.path} is in the middle of an epoch with other batches. Use the settings and "
            "the data of the checkpoint, or add --reset-dataloader to start with epoch 1."
        )


def remaining_batches(iterator: EpochBatchIterator, position: int) -> str:
    """Return a hash of the sentence numbers in the batches of this worker's epoch from a position on."""
    batches = iterator.epoch_batch_sampler.batches  # from the batch on with which the process began
    began = getattr(iterator, BEGINNING, {}).get(iterator.epoch, 0)
    digest = hashlib.sha256(f"{iterator.num_shards} {iterator.skip_remainder_batch}".encode())
    for batch in batches[position - began :]:
        digest.update(b"batch" + numpy.asarray(batch, dtype=numpy.int64).tobytes())
    return digest.hexdigest()


def save_batches(save: Callable) -> Callable:
    """Wrap ``EpochBatchIterator.state_dict``: add the hash of the remaining batches."""

    @functools.wraps(save)
    def state_dict(self):
        state = save(self)
        position = state["iterations_in_epoch"]
        return state | {BATCHES: remaining_batches(self, position)} if position else state

    return state_dict


# A position within an epoch is a number of batches. With other batches, sentences are left out or trained twice.
def compare_batches(load: Callable) -> Callable:
    """Wrap ``EpochBatchIterator.load_state_dict``: in the middle of an epoch, refuse other batches.

    Raises:
        OtherBatches: the remaining batches differ, or there are fewer batches than the checkpoint has used.
    """

    @functools.wraps(load)
    def load_state_dict(self, state_dict):
        position = state_dict.get("iterations_in_epoch", 0)
        if state_dict.get("version", 1) > 1 and 0 < len(self) <= position:
            raise OtherBatches
        load(self, state_dict)
        setattr(self, BEGINNING, {self.epoch: position})
        # the first worker saves
        if (
            position
            and self.shard_id == 0
            and (saved := state_dict.get(BATCHES))
            and saved != remaining_batches(self, position)
        ):
            raise OtherBatches

    return load_state_dict


def keep_settings_of_checkpoint(load: Callable) -> Callable:
    """Wrap ``Trainer.load_checkpoint``: keep the settings of the checkpoint's batches for :func:`name_other_batches`."""

    @functools.wraps(load)
    def load_checkpoint(self, filename, *args, **kwargs):
        token = _continuing.set(True)
        try:
            extra_state = load(self, filename, *args, **kwargs)
        finally:
            _continuing.reset(token)
        saved = extra_state.pop(SETTINGS, {}) if extra_state else {}
        present = settings_of_batches(self.cfg)
        changes = {name: (value, present.get(name)) for name, value in saved.items() if present.get(name) != value}
        self.changes_since = filename, changes
        return extra_state

    return load_checkpoint


def name_other_batches(load: Callable) -> Callable:
    """Wrap ``load_checkpoint``: name the settings that changed the batches in the middle of an epoch.

    A checkpoint without a hash, of fairseq or of version 0.2.0, is compared by the flags of :data:`MAKING_BATCHES`.

    Raises:
        OtherBatches: the batches differ.
    """

    @functools.wraps(load)
    def load_checkpoint(cfg, trainer, **kwargs):
        try:
            extra_state, iterator = load(cfg, trainer, **kwargs)
        except OtherBatches as error:
            raise OtherBatches(*trainer.changes_since) from error
        path, changes = getattr(trainer, "changes_since", ("", {}))
        state = (extra_state or {}).get("train_iterator", {})
        if (
            changes
            and state.get("iterations_in_epoch", 0)
            and not cfg.reset_dataloader
            and path != cfg.finetune_from_model
        ):
            flags = {name: values for name, values in changes.items() if name in MAKING_BATCHES}
            if BATCHES not in state and flags:
                raise OtherBatches(path, flags)
            for name, (saved, present) in changes.items():
                if name in DATA:
                    logger.warning(f"{name} is {present}; {path} is in the middle of an epoch of {saved}")
        return extra_state, iterator

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
BAD_EPOCHS = "num_bad_epochs"


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


# fairseq saves a checkpoint before this schedule sees the validation loss of the epoch, and does not save how many epochs in a row
# were bad.
def save_bad_epochs(save: Callable) -> Callable:
    """Wrap ``state_dict`` of the schedule reduce_lr_on_plateau: add the number of epochs without improvement."""

    @functools.wraps(save)
    def state_dict(self):
        return save(self) | {BAD_EPOCHS: self.lr_scheduler.num_bad_epochs}

    return state_dict


def load_bad_epochs(load: Callable) -> Callable:
    """Wrap ``load_state_dict`` of the schedule reduce_lr_on_plateau: continue to count epochs without improvement."""

    @functools.wraps(load)
    def load_state_dict(self, state_dict):
        load(self, state_dict)
        self.lr_scheduler.num_bad_epochs = state_dict.get(BAD_EPOCHS, 0)

    return load_state_dict


def end_epoch_of_checkpoint(load: Callable) -> Callable:
    """Wrap ``Trainer.load_checkpoint``: reduce_lr_on_plateau sees the loss of the epoch that the checkpoint ended."""

    @functools.wraps(load)
    def load_checkpoint(self, filename, reset_optimizer=False, reset_lr_scheduler=False, *args, **kwargs):
        extra_state = load(self, filename, reset_optimizer, reset_lr_scheduler, *args, **kwargs)
        position = (extra_state or {}).get("train_iterator")
        if (
            position
            and not position.get("iterations_in_epoch", 0)
            and not (reset_optimizer or reset_lr_scheduler)
            and isinstance(self.lr_scheduler, ReduceLROnPlateauLRSchedule)
        ):
            self.lr_step(position["epoch"] - 1, extra_state.get("val_loss"))
        return extra_state

    return load_checkpoint
