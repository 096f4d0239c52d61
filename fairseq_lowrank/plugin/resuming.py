"""An interrupted training goes on as if it had never stopped."""

import functools

from fairseq import trainer


# A task makes the batches of its training data once and shuffles that list anew in each epoch. The epoch in which the
# process began decides what sentences are a batch, so a process that resumes in a later one trains on others, and a
# checkpoint's place in the middle of an epoch points into another list. The loader made in epoch 1 keeps the shuffling of
# that epoch (--curriculum), and its workers their copy of the data as that epoch had it. Goes when fairseq saves with a
# checkpoint the epoch in which its batches were made.
def resume_with_the_first_batches() -> None:
    """Let every training that resumes after epoch 1, of stock models too, have the batches that were made in epoch 1."""
    get = trainer.Trainer.get_train_iterator

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

    trainer.Trainer.get_train_iterator = get_train_iterator


def _start_loader(batches, cfg) -> None:
    """Make the loader that ``batches`` keeps for all epochs, and start its workers, as training does in epoch 1."""
    if getattr(batches, "reuse_dataloader", False):
        fixed = cfg.distributed_training.fix_batches_to_gpus
        batches._get_iterator_for_epoch(1, shuffle=cfg.dataset.curriculum < 1, fix_batches_to_gpus=fixed)
        if batches.persistent_workers:
            iter(batches.dataloader)
