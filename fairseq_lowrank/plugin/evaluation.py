"""What fairseq's commands evaluate: all of it, in the precision that was asked for, and with a word where that changes numbers.

``LOWRANK_STOCK_EVALUATION=1`` in the environment leaves evaluation as fairseq has it.
"""

import argparse
import functools
import logging
import os
import sys
from collections.abc import Callable

from fairseq import checkpoint_utils, models, trainer
from fairseq.data import data_utils
from fairseq.tasks import language_modeling

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.plugin.arguments import is_training

logger = logging.getLogger(__name__)


def as_stock() -> bool:
    """Whether evaluation is left as fairseq has it."""
    return os.environ.get("LOWRANK_STOCK_EVALUATION", "0") not in ("", "0")


# fairseq's commands take --bf16 when they generate, score or serve, and then compute in float32. They alone are told a
# path: a model that comes by from_pretrained has the configuration of its training.
# fairseq-validate prepares no model; it overrides the arguments of the model's training with its own.
def evaluate_in_bfloat16() -> None:
    """Let ``--bf16`` mean bfloat16 in fairseq-generate, -interactive, -eval-lm and -validate, as ``--fp16`` means float16."""
    prepare, load_models = models.BaseFairseqModel.prepare_for_inference_, checkpoint_utils.load_model_ensemble_and_task

    def convert(model: models.BaseFairseqModel) -> None:
        logger.info("--bf16: the model computes in bfloat16; fairseq by itself would compute in float32")
        model.bfloat16()

    @functools.wraps(prepare)
    def prepare_for_inference_(self, cfg):
        if cfg.common.bf16 and cfg.common_eval.path is not None and not as_stock():
            convert(self)
        prepare(self, cfg)

    @functools.wraps(load_models)
    def load_model_ensemble_and_task(filenames, arg_overrides=None, *args, **kwargs):
        loaded = load_models(filenames, arg_overrides, *args, **kwargs)
        overrides = arg_overrides or {}
        if overrides.get("bf16") and "path" in overrides and not as_stock():
            for model in loaded[0]:
                convert(model)
        return loaded

    models.BaseFairseqModel.prepare_for_inference_ = prepare_for_inference_
    checkpoint_utils.load_model_ensemble_and_task = load_model_ensemble_and_task


# --required-batch-size-multiple, 8 by default, drops the last batch unless its size is a multiple: of a test set of 12
# sentences fairseq-generate translates 8. Training is left as it is, so that it stays comparable with stock fairseq's.
def evaluate_every_sentence() -> Callable[[argparse.Namespace, Callable[[str], bool]], None]:
    """Let validation during training see every sentence, and say of every evaluation how many fairseq would leave out.

    Returns:
        an amendment of parsed arguments, with which fairseq's evaluating commands see every sentence.
    """
    get_valid_iterator, batch = trainer.Trainer.get_valid_iterator, data_utils.batch_by_size
    stock_multiple = 1

    @functools.wraps(get_valid_iterator)
    def get_whole_valid_iterator(self, *args, **kwargs):
        nonlocal stock_multiple
        if as_stock():
            return get_valid_iterator(self, *args, **kwargs)
        dataset = self.cfg.dataset
        multiple, dataset.required_batch_size_multiple = dataset.required_batch_size_multiple, 1
        stock_multiple = multiple
        try:
            return get_valid_iterator(self, *args, **kwargs)
        finally:
            stock_multiple, dataset.required_batch_size_multiple = 1, multiple

    @functools.wraps(batch)
    def batch_by_size(indices, *args, **kwargs):
        batches = batch(indices, *args, **kwargs)
        if stock_multiple > 1:
            stock = batch(indices, *args, **kwargs | {"required_batch_size_multiple": stock_multiple})
            if left_out := sum(map(len, batches)) - sum(map(len, stock)):
                logger.info(
                    f"All {sum(map(len, batches))} sentences are evaluated; fairseq by itself would leave out {left_out} "
                    f"(--required-batch-size-multiple {stock_multiple})"
                )
        return batches

    def batches_of_any_size(args: argparse.Namespace, given: Callable[[str], bool]) -> None:
        nonlocal stock_multiple
        if is_training(args) or as_stock():
            stock_multiple = 1
        elif hasattr(args, "required_batch_size_multiple"):  # which fairseq-validate, parsing twice, has once
            # fairseq-interactive, which alone buffers lines, and -eval-lm, which alone has windows, batch all by themselves
            whole = hasattr(args, "buffer_size") or hasattr(args, "context_window")
            stock_multiple = 1 if whole else args.required_batch_size_multiple
            args.required_batch_size_multiple = 1

    trainer.Trainer.get_valid_iterator = get_whole_valid_iterator
    data_utils.batch_by_size = batch_by_size
    return batches_of_any_size


# fairseq-eval-lm asks for blocks of 1,024 tokens where no length is given. It leaves out the blocks that are too long for
# the model, with a warning, and reports the perplexity of the rest: 1.00 when nothing is left.
BLOCK = 1024
MODELS_BLOCK = sys.maxsize
"""``tokens_per_sample`` that means :data:`BLOCK`, or the length of the model's training where it is shorter."""


def blocks_of_model(args: argparse.Namespace, given: Callable[[str], bool]) -> None:
    """An amendment of parsed arguments: without ``--tokens-per-sample``, fairseq-eval-lm asks for what the model can take."""
    if as_stock():
        return
    if getattr(args, "context_window", None) is not None and hasattr(args, "tokens_per_sample"):
        if args.context_window < 0:
            raise UserError(f"--context-window {args.context_window}: expected a number of tokens >= 0")
        if not given("--tokens-per-sample"):
            args.tokens_per_sample = MODELS_BLOCK


def evaluate_every_block() -> None:
    """Let ``fairseq-eval-lm`` refuse blocks longer than the model accepts instead of leaving them out, and read the context of
    each block from the one before it, however many workers or shards there are."""
    task = language_modeling.LanguageModelingTask
    load, dataloader = task.load_dataset, task.eval_lm_dataloader
    load_models = checkpoint_utils.load_model_ensemble_and_task

    @functools.wraps(load_models)
    def load_model_ensemble_and_task(*args, **kwargs):
        models, cfg, task = load_models(*args, **kwargs)
        if (block := getattr(getattr(task, "args", None), "tokens_per_sample", None)) and block > MODELS_BLOCK // 2:
            window = MODELS_BLOCK - block
            length = min(BLOCK, cfg.task.tokens_per_sample, *(model.max_positions() for model in models))
            logger.info(f"--tokens-per-sample is not given: blocks of {length} tokens, the context window among them")
            task.args.tokens_per_sample = length - window
        return models, cfg, task

    @functools.wraps(load)
    def load_dataset(self, split, *args, **kwargs):
        if (block := self.args.tokens_per_sample) is not None and block < 1:
            raise UserError(
                f"blocks of {block} tokens: --tokens-per-sample must be above --context-window, and above 0"
            )
        return load(self, split, *args, **kwargs)

    @functools.wraps(dataloader)
    def eval_lm_dataloader(self, dataset, *args, max_positions=None, context_window=0, **kwargs):
        # the window stands before every block but the first
        window = context_window if len(dataset) > 1 else 0
        longest = max(dataset.sizes, default=0) + window
        if max_positions is not None and longest > max_positions and not as_stock():
            count = sum(size + window > max_positions for size in dataset.sizes)
            raise UserError(
                f"{count} of {len(dataset)} blocks are longer than the {max_positions} tokens the model accepts (the "
                f"longest has {longest}, the context window among them) and would be left out of the perplexity or cut "
                "short. Lower --tokens-per-sample or raise max_target_positions in --model-overrides"
            )
        if context_window and not as_stock():
            kwargs |= one_after_another(context_window, **kwargs)
        return dataloader(self, dataset, *args, max_positions=max_positions, context_window=context_window, **kwargs)

    task.load_dataset, task.eval_lm_dataloader = load_dataset, eval_lm_dataloader
    checkpoint_utils.load_model_ensemble_and_task = load_model_ensemble_and_task


# A process keeps the tokens of the last block that it read: one of several would give a block the context of another.
def one_after_another(
    context_window: int, num_shards: int = 1, num_workers: int = 1, **others: object
) -> dict[str, int]:
    """How many processes read blocks that have a context: one.

    Raises:
        UserError: shards, which do not have the blocks before theirs.
    """
    if num_shards > 1:
        raise UserError(
            f"{num_shards} shards (--num-shards, or as many workers): with --context-window {context_window} each block needs the "
            "one before it, and a shard lacks it; expected 1"
        )
    if num_workers > 1:
        logger.info(
            f"One process reads the data, not {num_workers} (--num-workers): with --context-window {context_window} each block "
            "needs the one before it; fairseq by itself would give blocks the context of others"
        )
    return {"num_workers": min(num_workers, 1)}
