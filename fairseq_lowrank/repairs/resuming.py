"""Resuming a training: bit for bit like an uninterrupted one, or an error that names the flag to add."""

import functools
from collections.abc import Callable
from pathlib import Path

from fairseq.file_io import PathManager

from fairseq_lowrank.messages import InvalidCheckpoint
from fairseq_lowrank.repairs.checkpoints import written_whole
from fairseq_lowrank.repairs.loading import load_checkpoint


# A task makes its training batches once, and shuffles their list in each epoch. The batches depend on the epoch in which
# the process started. So a process that resumes in a later epoch trains on other batches, and a checkpoint's position within
# an epoch refers to another list. A data loader made in epoch 1 also keeps that epoch's shuffling (--curriculum) and data.
def resume_with_the_first_batches(get: Callable) -> Callable:
    """Wrap ``get_train_iterator``: a training that resumes after epoch 1 gets the batches of epoch 1."""

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
        # without a cache (sharded data) each epoch has its own data and batches
        if epoch == 1 or not load_dataset or disable_iterator_cache:
            return get(self, epoch, load_dataset=load_dataset, disable_iterator_cache=disable_iterator_cache, **options)
        first = get(self, 1, load_dataset=True, **options)
        batches = get(self, epoch, load_dataset=False, **options)
        if batches is first:
            _start_loader(batches, self.cfg)
            batches.epoch = epoch
            batches.dataset.set_epoch(epoch)
            if callable(getattr(batches, "batch_sampler", None)):
                batches._frozen_batches = None  # such batches are made in each epoch
        return batches

    return get_train_iterator


def _start_loader(batches, cfg) -> None:
    """Make the data loader that ``batches`` reuses in all epochs, and start its workers, as in epoch 1."""
    if getattr(batches, "reuse_dataloader", False):
        fixed = cfg.distributed_training.fix_batches_to_gpus
        batches.next_epoch_itr(cfg.dataset.curriculum < 1, fixed, set_dataset_epoch=False)
        if batches.persistent_workers:
            iter(batches.dataloader)


def replace_checkpoints_whole(copy: Callable) -> Callable:
    """Wrap ``copy``: write a copy of a checkpoint to a temporary file, and then rename it."""

    @functools.wraps(copy)
    def copy_whole(src_path, dst_path, overwrite=False):
        if not overwrite or not PathManager.supports_rename(dst_path):
            return copy(src_path, dst_path, overwrite)
        unfinished = f"{dst_path}.tmp"  # fairseq uses this suffix too
        with written_whole(dst_path):
            done = copy(src_path, unfinished, overwrite=True)
            PathManager.rename(unfinished, dst_path)
        return done

    return copy_whole


def name_whole_checkpoints(load: Callable) -> Callable:
    """Wrap ``load_checkpoint``: if ``checkpoint_last.pt`` is damaged, name the newest intact checkpoint and the flag."""

    @functools.wraps(load)
    def load_from_folder(cfg, trainer, **kwargs):
        try:
            return load(cfg, trainer, **kwargs)
        except InvalidCheckpoint as error:
            suffix = trainer.checkpoint_suffix
            last = Path(cfg.save_dir, f"checkpoint_last{suffix}.pt")
            if cfg.restore_file != "checkpoint_last.pt" or Path(error.path) != last:
                raise
            if (intact := _newest_intact(last, suffix)) is None:
                raise
            instead = " in place of --finetune-from-model" if cfg.finetune_from_model else ""
            remedy = f"To resume from the newest intact checkpoint, add --restore-file {intact}{instead}"
            raise InvalidCheckpoint(error.path, error.reason, remedy) from error

    return load_from_folder


def _newest_intact(last: Path, suffix: str) -> Path | None:
    """Return the newest checkpoint in the folder of ``last`` that loads."""
    others = [path for path in last.parent.glob(f"checkpoint*{suffix}.pt") if path != last]
    for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            load_checkpoint(path)
        except (InvalidCheckpoint, OSError):
            continue
        return path
    return None
