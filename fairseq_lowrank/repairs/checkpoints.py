"""Repairs of saving checkpoints."""

import contextlib
import fcntl
import functools
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import torch
from fairseq import checkpoint_utils

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.repairs.patch import Patch, group

logger = logging.getLogger(__name__)


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


class CheckpointNotWritten(UserError):
    """A checkpoint that could not be written. Nothing is left under its name, or the file that was there before.

    Args:
        path: the checkpoint.
        reason: why it could not be written.
    """

    def __init__(self, path: str | os.PathLike, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = os.fspath(path), reason

    def __str__(self) -> str:
        return f"{self.path} cannot be written: {self.reason}. Free some space there, and give the same command again."


def reason_of_system(error: BaseException | None) -> str | None:
    """Return the reason of the newest OSError among an exception and the exceptions that it was raised over."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return None if error is None else error.strerror or str(error)


@contextlib.contextmanager
def written_whole(path: str) -> Iterator[None]:
    """Remove the unfinished file of a checkpoint if it cannot be written.

    Raises:
        CheckpointNotWritten: the system refused to write.
    """
    try:
        yield
    except BaseException as error:
        Path(f"{path}.tmp").unlink(missing_ok=True)
        reason = reason_of_system(error)  # torch raises a RuntimeError over the OSError
        if reason is None or not isinstance(error, Exception):
            raise
        raise CheckpointNotWritten(path, reason) from error


def save_whole(save: Callable) -> Callable:
    """Wrap ``torch_persistent_save``: end in one line if the disk is full, without an unfinished file."""

    @functools.wraps(save)
    def torch_persistent_save(obj, filename, async_write=False):
        with written_whole(filename):
            save(obj, filename, async_write)

    return torch_persistent_save


# fairseq tries three times, and each time writes after what it wrote before, which torch does not read.
def save_once(save: Callable) -> Callable:
    """Wrap ``_torch_persistent_save``: write to an open file once."""

    @functools.wraps(save)
    def _torch_persistent_save(obj, f):
        return save(obj, f) if isinstance(f, str) else torch.save(obj, f)

    return _torch_persistent_save


def name_unwritable_folder(verify: Callable) -> Callable:
    """Wrap ``verify_checkpoint_directory``: end in one line if the folder cannot be written."""

    @functools.wraps(verify)
    def verify_checkpoint_directory(save_dir):
        try:
            verify(save_dir)
        except OSError as error:
            raise UserError(
                f"--save-dir {save_dir}: {error.strerror}. Give another folder, or free some space."
            ) from error

    return verify_checkpoint_directory


LOCK = ".lock"
_locks: dict[Path, TextIO] = {}
"""The open lock of the folder into which this process saves. Closing the file would give up the lock."""


# A lock of lockf is of the process, so the processes that read data do not keep it, and it works on shared disks.
def lock_save_folder(load: Callable) -> Callable:
    """Wrap ``load_checkpoint``: refuse to train into the folder of another training.

    Raises:
        UserError: another process has locked the folder.
    """

    @functools.wraps(load)
    def load_checkpoint(cfg, trainer, **kwargs):
        if not cfg.no_save and trainer.should_save_checkpoint_on_current_rank:
            _lock(Path(cfg.save_dir).resolve(), trainer.checkpoint_suffix)
        try:
            return load(cfg, trainer, **kwargs)
        except BaseException:  # this training never begins
            _unlock()
            raise

    return load_checkpoint


# The process may live on after its training, as a notebook does.
def unlock_save_folder(call_main: Callable) -> Callable:
    """Wrap ``call_main``: unlock the folder when the training ends."""

    @functools.wraps(call_main)
    def call_and_unlock(cfg, main, **kwargs):
        try:
            return call_main(cfg, main, **kwargs)
        finally:
            _unlock()

    return call_and_unlock


def _lock(folder: Path, suffix: str) -> None:
    path = folder / f"{LOCK}{suffix}"
    if path in _locks:
        return
    while _locks:  # an earlier training of this process has ended
        _locks.popitem()[1].close()
    folder.mkdir(parents=True, exist_ok=True)
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(file.fileno()).st_nlink:  # its holder has removed it since it was opened
            file.close()
            return _lock(folder, suffix)
    except (BlockingIOError, PermissionError) as error:  # POSIX allows either
        file.seek(0)
        raise UserError(
            f"--save-dir {folder}: another training ({file.read().strip()}) writes into this folder. Wait for its end, or give "
            "another folder."
        ) from error
    except OSError as error:
        logger.warning(f"{folder} cannot be locked ({error.strerror}); do not start another training there")
        return
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    _locks[path] = file


def _unlock() -> None:
    """Remove the lock of this process."""
    while _locks:
        path, file = _locks.popitem()
        path.unlink(missing_ok=True)
        file.close()


PATCHES = (
    *group(
        "fix",
        "full-disk",
        {
            "fairseq.checkpoint_utils.torch_persistent_save": save_whole,
            "fairseq.checkpoint_utils._torch_persistent_save": save_once,
            "fairseq.checkpoint_utils.verify_checkpoint_directory": name_unwritable_folder,
        },
        "A full disk ends a training in a traceback without the path, and leaves an unfinished file.",
        "fairseq writes a checkpoint once, and names the file that it cannot write",
    ),
    *group(
        "fix",
        "locked-folder",
        {
            "fairseq.checkpoint_utils.load_checkpoint": lock_save_folder,
            "fairseq.distributed.utils.call_main": unlock_save_folder,
        },
        "Two trainings with one --save-dir replace each other's checkpoints.",
        "fairseq locks the folder",
    ),
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
)
