"""Language modelling on consecutive segments, for models that cache the hidden states of the previous segment."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from fairseq.data import BaseWrapperDataset, FairseqDataset, iterators
from fairseq.distributed import utils as distributed
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from torch import Tensor, nn

from fairseq_lowrank.messages import UserError

logger = logging.getLogger(__name__)


@dataclass
class SegmentLanguageModelingConfig(LanguageModelingConfig):
    """The flags of fairseq's language modelling."""


class StreamBatcher:
    """The batches of a text that is divided into as many streams as a batch has rows; batch i has block i of each stream.

    ::

        blocks 0 … 9, 4 rows:   0 3 6 9 │ 1 4 7 │ 2 5 8

    Every block is used. The last streams may be shorter: then the later batches have fewer rows.

    Args:
        blocks: the number of blocks.
        rows: the number of rows of a worker's batch.
        workers: the number of workers that share the streams. Their batches alternate, as fairseq distributes them.
    """

    def __init__(self, blocks: int, rows: int, workers: int = 1) -> None:
        self.blocks, self.rows, self.workers = blocks, rows, workers
        self.segments = -(-blocks // (rows * workers))

    def batches(self) -> list[list[int]]:
        """Return the blocks of each batch: segment by segment, and for each worker in turn."""
        starts = range(0, self.rows * self.workers * self.segments, self.segments)
        batches = []
        for segment in range(self.segments):
            for worker in range(self.workers):
                own = starts[worker * self.rows : (worker + 1) * self.rows]
                batches.append([first + segment for first in own if first + segment < self.blocks])
        return batches


class SegmentCache(NamedTuple):
    """The number of the next segment, and the inputs of each layer at the positions before it, ``[M, B, C]`` each.

    A model keeps one for training and one for evaluation in ``memories``.
    """

    segment: int
    hidden: list[Tensor]


class SegmentDataset(BaseWrapperDataset):
    """Blocks of text whose batches contain their place in the streams (``net_input.segment``: number, count)."""

    def __init__(self, dataset: FairseqDataset, streams: StreamBatcher) -> None:
        super().__init__(dataset)
        self.streams = streams

    def collater(self, samples: list[dict]) -> dict:
        batch = self.dataset.collater(samples)
        if batch:
            segments = self.streams.segments
            batch["net_input"]["segment"] = (samples[0]["id"] % segments, segments)
        return batch


# fairseq's own truncated_bptt_lm never predicts a segment's first token, uses the memory of validation in training, and does
# not save the memory. Importing it also registers a model that cannot be built.
@register_task("segment_lm", dataclass=SegmentLanguageModelingConfig)
class SegmentLanguageModelingTask(LanguageModelingTask):
    """A version of fairseq's ``language_modeling`` with the blocks of ``--tokens-per-sample`` in the order of the text.

    A batch has ``--batch-size`` streams (or as many as ``--max-tokens`` allows). At evaluation it has one stream unless
    ``--batch-size`` is given, so every block except the first has the block before it as its memory. A checkpoint in the
    middle of an epoch contains the memory, so a training of one worker resumes exactly.
    """

    def __init__(self, args, *rest, **options) -> None:
        super().__init__(args, *rest, **options)
        if args.sample_break_mode not in (None, "none"):
            raise UserError(f"--sample-break-mode {args.sample_break_mode}: segments must be consecutive. Use none.")
        self._models: list[nn.Module] = []

    @classmethod
    def check_model(cls, model: type, args) -> None:
        """Refuse a model that does not accept segments.

        Raises:
            UserError: the model has no memory of earlier segments.
        """
        if not getattr(model, "takes_segments", False):
            raise UserError(f"--task segment_lm: {args.arch} has no memory. Use --arch lowrank_transformer_xl_wiki103.")

    def build_model(self, args, from_checkpoint: bool = False):
        model = super().build_model(args, from_checkpoint)
        self._models.append(model)
        return model

    def get_batch_iterator(
        self,
        dataset,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        seed: int = 1,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        epoch: int = 1,
        data_buffer_size: int = 0,
        skip_remainder_batch: bool = False,
        **unused: object,
    ) -> iterators.EpochBatchIterator:
        """Return an iterator over the batches of :class:`StreamBatcher`, without shuffling."""
        limits = [max_sentences] if max_sentences else []
        if max_tokens:
            limits.append(max_tokens // max(1, min(self.args.tokens_per_sample, max(dataset.sizes, default=1))))
        if not limits or min(limits) < 1:
            raise UserError(
                f"--max-tokens {max_tokens}: expected at least --tokens-per-sample {self.args.tokens_per_sample}. Raise it, or add "
                "--batch-size."
            )
        dataset = SegmentDataset(dataset, StreamBatcher(len(dataset), min(limits), num_shards))
        return iterators.EpochBatchIterator(
            dataset=dataset,
            collate_fn=dataset.collater,
            batch_sampler=dataset.streams.batches(),
            seed=seed,
            num_shards=num_shards,
            shard_id=shard_id,
            num_workers=num_workers,
            epoch=epoch,
            buffer_size=data_buffer_size,
            disable_shuffling=True,
            skip_remainder_batch=skip_remainder_batch,
        )

    def eval_lm_dataloader(self, dataset, *args, batch_size: int | None = None, context_window: int = 0, **options):
        if context_window:
            raise UserError(
                f"--context-window {context_window}: with --task segment_lm the memory is the context. For more of it, use "
                "--model-overrides \"{'memory_length': N}\"."
            )
        if batch_size is None:
            batch_size = 1
            logger.info("one stream of segments: each has the memory of the one before; --batch-size N makes N streams")
        return super().eval_lm_dataloader(dataset, *args, batch_size=batch_size, context_window=0, **options)

    def get_checkpoint_dict(self) -> dict:
        """Return the memory of training, for the checkpoint."""
        memory = self._memories()[0].get(True) if self._memories() else None
        state = {} if memory is None else {"segment": memory.segment, "hidden": [part.cpu() for part in memory.hidden]}
        return {type(self).__name__: state}

    def set_checkpoint_dict(self, state: dict) -> None:
        """Restore the memory of training from a checkpoint, which has the first worker's."""
        if distributed.get_data_parallel_world_size() > 1:
            logger.warning(
                "a checkpoint has the memory of the first worker only: all workers resume with an empty memory"
            )
            return
        for memories in self._memories():
            memories[True] = SegmentCache(state["segment"], list(state["hidden"]))

    def _memories(self) -> list[dict]:
        parts: Iterator[Any] = (part for model in self._models for part in model.modules())
        return [part.memories for part in parts if hasattr(part, "memories")]
