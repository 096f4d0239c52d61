"""An interrupted training goes on as if it had never stopped, or says in one line why it cannot."""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from fairseq_lowrank.plugin.loading import UserError


# A task makes the batches of its training data once and shuffles that list anew in each epoch. The epoch in which the
# process began decides what sentences are a batch, so a process that resumes in a later one trains on others, and a
# checkpoint's place in the middle of an epoch points into another list. The loader made in epoch 1 keeps the shuffling of
# that epoch (--curriculum), and its workers their copy of the data as that epoch had it. Goes when fairseq saves with a
# checkpoint the epoch in which its batches were made.
def resume_with_the_first_batches(get: Callable) -> Callable:
    """Let every training that resumes after epoch 1, of stock models too, have the batches that were made in epoch 1."""

    @functools.wraps(get)
    def get_train_iterator(
        self,
        epoch,
        combine=True,
        load_dataset=True,
        data_selector=None,
        shard_batch_itr=True,
        disable_iterator_cache=False,
    ):
        options = {"combine": combine, "data_selector": data_selector, "shard_batch_itr": shard_batch_itr}
        # without a cache (sharded data) each epoch has data and batches of its own
        if epoch == 1 or not load_dataset or disable_iterator_cache:
            return get(self, epoch, load_dataset=load_dataset, disable_iterator_cache=disable_iterator_cache, **options)
        first = get(self, 1, load_dataset=True, **options)
        batches = get(self, epoch, load_dataset=False, **options)
        if batches is first:
            _start_loader(batches, self.cfg)
            batches.epoch = epoch
            batches.dataset.set_epoch(epoch)
            if callable(getattr(batches, "batch_sampler", None)):
                batches._frozen_batches = None  # made again in each epoch
        return batches

    return get_train_iterator


def _start_loader(batches, cfg) -> None:
    """Make the loader that ``batches`` keeps for all epochs, and start its workers, as training does in epoch 1."""
    if getattr(batches, "reuse_dataloader", False):
        fixed = cfg.distributed_training.fix_batches_to_gpus
        batches._get_iterator_for_epoch(1, shuffle=cfg.dataset.curriculum < 1, fix_batches_to_gpus=fixed)
        if batches.persistent_workers:
            iter(batches.dataloader)


# fairseq copies each checkpoint in place onto checkpoint_last.pt and checkpoint_best.pt: a kill or a full disk in that
# moment leaves half a file, and every later call is refused. Goes when fairseq renames copies as it does what it saves.
def replace_checkpoints_whole(copy: Callable) -> Callable:
    """Let a copy of a checkpoint be made beside the file that it replaces, and take its place when it is whole."""

    @functools.wraps(copy)
    def copy_whole(src_path, dst_path, overwrite=False):
        if not overwrite or not PathManager.supports_rename(dst_path):
            return copy(src_path, dst_path, overwrite)
        unfinished = f"{dst_path}.tmp"  # the name that fairseq gives to what it is saving
        try:
            done = copy(src_path, unfinished, overwrite=True)
            PathManager.rename(unfinished, dst_path)
            return done
        finally:
            Path(unfinished).unlink(missing_ok=True)

    return copy_whole


# Goes when fairseq falls back on another checkpoint by itself.
def name_whole_checkpoints(load: Callable) -> Callable:
    """Where ``checkpoint_last.pt`` is damaged, name the newest whole checkpoint beside it and the flag that takes it."""

    @functools.wraps(load)
    def load_checkpoint(cfg, trainer, **kwargs):
        try:
            return load(cfg, trainer, **kwargs)
        except UserError as error:
            last = Path(cfg.save_dir, f"checkpoint_last{trainer.checkpoint_suffix}.pt")
            if cfg.restore_file != "checkpoint_last.pt" or not last.exists() or _state(last) is not None:
                raise
            if (whole := _newest_whole(last, trainer.checkpoint_suffix)) is None:
                raise
            instead = " in place of --finetune-from-model" if cfg.finetune_from_model else ""
            raise UserError(
                f"{error}. To go on from the newest whole one, add --restore-file {whole}{instead}"
            ) from error

    return load_checkpoint


def _newest_whole(last: Path, suffix: str) -> Path | None:
    """The checkpoint beside ``last`` that was written last of those that load."""
    others = [path for path in last.parent.glob(f"checkpoint*{suffix}.pt") if path != last]
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in others if _state(path) is not None), None)


def _state(path: str | Path) -> dict | None:
    """What a checkpoint holds; ``None`` if it does not load."""
    try:
        return checkpoint_utils.load_checkpoint_to_cpu(str(path))
    except (UserError, OSError):
        return None


# fairseq's trainer says only that architectures should match, below what the model says of it and two tracebacks, and it
# leaves it to torch and to bare assertions to say that the optimizer's state is of other parameters. Goes when fairseq
# answers in a line.
def explain_what_cannot_resume(load: Callable) -> Callable:
    """Say in one line why a checkpoint does not go on with these flags, and which flag to add."""

    @functools.wraps(load)
    def load_checkpoint(self, filename, *args, **kwargs):
        try:
            return load(self, filename, *args, **kwargs)
        except UserError:
            raise
        except Exception as error:
            if reason := _why_not(error, filename, self.cfg):
                raise UserError(reason) from error
            raise

    return load_checkpoint


def _why_not(error: Exception, filename: str, cfg) -> str | None:
    """The line about an ``error`` of loading a checkpoint, or ``None`` if it is about other things."""
    if cfg.ema.store_ema and isinstance(error, KeyError) and error.args == ("model",):
        return f"{filename} holds no moving average of the parameters (EMA) to go on with: train without --store-ema"
    if isinstance(error.__context__, UserError):
        message = f"Cannot load model parameters from checkpoint {filename}: {error.__context__}"
        flags = _flags_of(filename, cfg.model) if message.endswith("trained with") else ""
        own = flags and Path(filename).parent == Path(cfg.checkpoint.save_dir)
        return f"{message}{flags}{', or another --save-dir' if own else ''}"
    if isinstance(error, AssertionError) and "--reset-optimizer" in str(error):
        return f"{filename}: {error}"
    if isinstance(error, ValueError) and "loaded state dict" in str(error):
        return (
            f"{filename} holds the optimizer's state of other parameters than this model's: add --reset-optimizer to take "
            "its parameters alone (and --reset-dataloader to begin with epoch 1)"
        )
    return None


def _flags_of(filename: str, model) -> str:
    """``: --FLAG VALUE …``: the architecture and attention flags of a checkpoint that differ from those of ``model``."""
    from fairseq_lowrank.plugin.flags import FLAGS  # registers models, which come after the repairs

    theirs, ours = _options(_state(filename)["cfg"]["model"]), _options(model)
    flags = []
    for name in ("arch", *FLAGS):
        value = theirs.get(name)
        if value == ours.get(name) or name in ("attention_backend", "mixing_lr_scale"):
            continue
        flag = f"--{name.replace('_', '-')}"
        flags.append(f"no {flag}" if value in (None, False) else flag if value is True else f"{flag} {value}")
    return f": {', '.join(flags)}" if flags else ""


def _options(model) -> dict:
    """The options of a model; one with a dataclass keeps its name where others keep their architecture."""
    if isinstance(model, argparse.Namespace):
        return vars(model)
    return {"arch": model.get("_name"), **model}
