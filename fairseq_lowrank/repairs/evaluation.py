"""Evaluation by fairseq's commands on every sentence and block, with a log line if that changes a number."""

import argparse
import functools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from fairseq.data import Dictionary
from torch import Tensor

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.repairs.arguments import CommandLine
from fairseq_lowrank.repairs.programs import Program, program_of

logger = logging.getLogger(__name__)


# --- bfloat16


def _convert_to_bfloat16(model) -> None:
    logger.info("--bf16: the model computes in bfloat16; stock fairseq would compute in float32")
    model.bfloat16()


# fairseq's commands accept --bf16 when they generate or score, and then compute in float32. Only their configuration has a
# path: a model from from_pretrained has the configuration of its training.
def prepare_in_bfloat16(prepare: Callable) -> Callable:
    """Wrap ``prepare_for_inference_``: ``--bf16`` means bfloat16 in fairseq-generate, -interactive and -eval-lm."""

    @functools.wraps(prepare)
    def prepare_for_inference_(self, cfg):
        if cfg.common.bf16 and cfg.common_eval.path is not None:
            _convert_to_bfloat16(self)
        prepare(self, cfg)

    return prepare_for_inference_


def load_in_bfloat16(load: Callable) -> Callable:
    """Wrap ``load_model_ensemble_and_task``: ``--bf16``, an override of fairseq-validate, means bfloat16."""

    @functools.wraps(load)
    def load_model_ensemble_and_task(filenames, arg_overrides=None, *args, **kwargs):
        loaded = load(filenames, arg_overrides, *args, **kwargs)
        overrides = arg_overrides or {}
        if overrides.get("bf16") and "path" in overrides:
            for model in loaded[0]:
                _convert_to_bfloat16(model)
        return loaded

    return load_model_ensemble_and_task


# --- every sentence


@dataclass
class Evaluation:
    """What the current evaluation does otherwise than stock fairseq.

    Attributes:
        stock_multiple: ``--required-batch-size-multiple`` before it was set to 1; 1 if no sentence would be left out.
        chooses_blocks: True if fairseq-eval-lm has no ``--tokens-per-sample`` and has not loaded its model yet.
        program: the command.
        unknown: tokens, and unknown words among them, by their side.
    """

    stock_multiple: int = 1
    chooses_blocks: bool = False
    program: Program | None = None
    unknown: Counter = field(default_factory=Counter)


CURRENT = Evaluation()
"""The evaluation whose command line was parsed last: fairseq passes none of this from its parser to its data."""


# --required-batch-size-multiple, 8 by default, cuts the last batch to a multiple: fairseq-generate translates 8 of 12
# sentences.
def batches_of_any_size(args: argparse.Namespace, line: CommandLine) -> None:
    """Set ``--required-batch-size-multiple`` to 1 in the arguments of commands that evaluate."""
    program = program_of(args)
    CURRENT.program, CURRENT.unknown = program, Counter()
    if program is Program.TRAIN:
        CURRENT.stock_multiple = 1
    elif hasattr(args, "required_batch_size_multiple"):  # fairseq-validate parses twice, once without this flag
        whole = program in (Program.INTERACTIVE, Program.EVAL_LM)  # these use all sentences
        CURRENT.stock_multiple = 1 if whole else args.required_batch_size_multiple
        args.required_batch_size_multiple = 1


def announce_sentences(batch: Callable) -> Callable:
    """Wrap ``batch_by_size``: log how many sentences of an evaluation fairseq would leave out."""

    @functools.wraps(batch)
    def batch_by_size(indices, *args, **kwargs):
        batches = batch(indices, *args, **kwargs)
        if (multiple := CURRENT.stock_multiple) > 1:
            stock = batch(indices, *args, **kwargs | {"required_batch_size_multiple": multiple})
            if left_out := sum(map(len, batches)) - sum(map(len, stock)):
                logger.info(
                    f"All {sum(map(len, batches))} sentences are evaluated; stock fairseq would leave out {left_out} "
                    f"(--required-batch-size-multiple {multiple})"
                )
        return batches

    return batch_by_size


def validate_every_sentence(get_valid_iterator: Callable) -> Callable:
    """Wrap ``Trainer.get_valid_iterator``: validation during training uses every sentence."""

    @functools.wraps(get_valid_iterator)
    def get_whole_valid_iterator(self, *args, **kwargs):
        dataset = self.cfg.dataset
        stock = dataset.required_batch_size_multiple
        CURRENT.stock_multiple, dataset.required_batch_size_multiple = stock, 1
        try:
            return get_valid_iterator(self, *args, **kwargs)
        finally:
            CURRENT.stock_multiple, dataset.required_batch_size_multiple = 1, stock

    return get_whole_valid_iterator


def announce_validation(get_valid_iterator: Callable) -> Callable:
    """Wrap ``Trainer.get_valid_iterator``: log, once for each set of a training, how many samples validation leaves out."""

    @functools.wraps(get_valid_iterator)
    def get_announced_iterator(self, subset, *args, **kwargs):
        iterator = get_valid_iterator(self, subset, *args, **kwargs)
        announced = vars(self).setdefault("announced_subsets", set())
        multiple = self.cfg.dataset.required_batch_size_multiple
        if subset not in announced and multiple > 1 and hasattr(iterator, "frozen_batches"):
            announced.add(subset)
            used, every = sum(map(len, iterator.frozen_batches)), len(self.task.dataset(subset))
            if used < every:
                logger.info(
                    f"Validation uses {used} of the {every} samples of '{subset}' (--required-batch-size-multiple {multiple}); "
                    "its loss, and BLEU of --eval-bleu, are of these alone. LOWRANK_ENABLE=whole-validation uses all."
                )
        return iterator

    return get_announced_iterator


# fairseq-generate reads the number of workers, which its parser sets to 1.
def translate_a_shard(args: argparse.Namespace, line: CommandLine) -> None:
    """Let ``--num-shards N --shard-id I`` of fairseq-generate translate the batches I, I + N, I + 2 N …, and no others."""
    if program_of(args) is Program.GENERATE and getattr(args, "num_shards", 1) > 1:
        args.distributed_world_size, args.distributed_rank = args.num_shards, args.shard_id
        logger.info(
            f"--num-shards {args.num_shards}: a score is that of the sentences of shard {args.shard_id} alone; stock fairseq "
            "would translate all of them in each shard"
        )


# --- unknown words

SHARE = 0.01
"""The share of unknown words from which on a line says so."""


def _count(side: str, tokens: Tensor | None, dictionary: Dictionary) -> None:
    if tokens is not None:
        CURRENT.unknown[side, "all"] += int(tokens.ne(dictionary.pad()).sum())
        CURRENT.unknown[side, "unknown"] += int(tokens.eq(dictionary.unk()).sum())


def _announce_unknown_words() -> None:
    for side in ("source", "reference", "text"):
        unknown, tokens = CURRENT.unknown[side, "unknown"], CURRENT.unknown[side, "all"]
        if unknown > SHARE * tokens:
            logger.warning(
                f"{unknown / tokens:.1%} of the tokens of the {side} are <unk>, words that no dictionary has"
            )
    CURRENT.unknown.clear()


def count_unknown_words(step: Callable) -> Callable:
    """Wrap ``FairseqTask.inference_step``: fairseq-generate counts unknown words of sources and references."""

    @functools.wraps(step)
    def inference_step(self, generator, models, sample, *args, **kwargs):
        if CURRENT.program is Program.GENERATE and self.source_dictionary and self.target_dictionary:
            _count("source", sample["net_input"].get("src_tokens"), self.source_dictionary)
            _count("reference", sample.get("target"), self.target_dictionary)
        return step(self, generator, models, sample, *args, **kwargs)

    return inference_step


def count_unknown_targets(generate: Callable) -> Callable:
    """Wrap ``SequenceScorer.generate``: fairseq-eval-lm counts unknown words of its text."""

    @functools.wraps(generate)
    def generate_counted(self, models, sample, **kwargs):
        if CURRENT.program is Program.EVAL_LM:
            _count("text", sample.get("target"), models[0].decoder.dictionary)
        return generate(self, models, sample, **kwargs)

    return generate_counted


def announce_unknown_words_with_score(build: Callable) -> Callable:
    """Wrap ``build_scorer``: a line before the score says how many words are unknown."""

    @functools.wraps(build)
    def build_scorer(choice, tgt_dict):
        scorer = build(choice, tgt_dict)
        result = scorer.result_string

        def result_string(*args):
            _announce_unknown_words()
            return result(*args)

        scorer.result_string = result_string
        return scorer

    return build_scorer


def announce_unknown_words_at_end(call_main: Callable) -> Callable:
    """Wrap ``call_main``: a line after the perplexity of fairseq-eval-lm says how many words are unknown."""

    @functools.wraps(call_main)
    def call_and_announce(cfg, main, **kwargs):
        try:
            return call_main(cfg, main, **kwargs)
        finally:
            _announce_unknown_words()

    return call_and_announce


# --- every block

# fairseq-eval-lm makes blocks of 1,024 tokens if no length is given. It leaves out the blocks that are too long for the
# model, with a warning, and reports the perplexity of the rest: 1.00 if nothing is left.
BLOCK = 1024


def blocks_of_model(args: argparse.Namespace, line: CommandLine) -> None:
    """Let fairseq-eval-lm choose blocks that the model accepts if ``--tokens-per-sample`` is not given.

    The length is :data:`BLOCK`, or that of the model's training if it is shorter.
    """
    reads_text = program_of(args) is Program.EVAL_LM and hasattr(args, "tokens_per_sample")
    CURRENT.chooses_blocks = reads_text and not line.has("--tokens-per-sample")
    if CURRENT.chooses_blocks:
        args.tokens_per_sample = BLOCK


def load_with_blocks_of_model(load: Callable) -> Callable:
    """Wrap ``load_model_ensemble_and_task``: choose the blocks of fairseq-eval-lm after the model is loaded."""

    @functools.wraps(load)
    def load_model_ensemble_and_task(*args, **kwargs):
        models, cfg, task = load(*args, **kwargs)
        if CURRENT.chooses_blocks and kwargs.get("task") is not None:  # fairseq-eval-lm gives its task
            CURRENT.chooses_blocks = False
            window = BLOCK - task.args.tokens_per_sample  # fairseq has subtracted it
            length = min(BLOCK, cfg.task.tokens_per_sample, *(model.max_positions() for model in models))
            logger.info(f"--tokens-per-sample is not given: blocks of {length} tokens, the context window among them")
            task.args.tokens_per_sample = length - window
        return models, cfg, task

    return load_model_ensemble_and_task


def evaluate_every_block(dataloader: Callable) -> Callable:
    """Wrap ``LanguageModelingTask.eval_lm_dataloader``: refuse blocks that the model does not accept.

    Each block has the block before it as its context, for any number of workers.
    """

    @functools.wraps(dataloader)
    def eval_lm_dataloader(self, dataset, *args, max_positions=None, context_window=0, **kwargs):
        # the window precedes every block but the first
        window = context_window if len(dataset) > 1 else 0
        longest = max(dataset.sizes, default=0) + window
        if max_positions is not None and longest > max_positions:
            count = sum(size + window > max_positions for size in dataset.sizes)
            raise UserError(
                f"--tokens-per-sample: {count} of {len(dataset)} blocks are longer than the {max_positions} tokens that the "
                f"model accepts (the longest has {longest}, the context window among them), and would be left out or cut. "
                "Lower it, or raise max_target_positions in --model-overrides."
            )
        if context_window:
            kwargs |= one_after_another(context_window, **kwargs)
        return dataloader(self, dataset, *args, max_positions=max_positions, context_window=context_window, **kwargs)

    return eval_lm_dataloader


# A process uses the last block that it read as the context of the next one. With several processes that is a wrong block.
def one_after_another(
    context_window: int, num_shards: int = 1, num_workers: int = 1, **others: object
) -> dict[str, int]:
    """Return options for a single process that reads the blocks in order.

    Raises:
        UserError: there are several shards; a shard lacks the block before its first one.
    """
    if num_shards > 1:
        raise UserError(
            f"--context-window {context_window}: does not work with {num_shards} shards, because a block needs the one before "
            "it, which may be in another shard. Use --num-shards 1 and one worker."
        )
    if num_workers > 1:
        logger.info(
            f"One process reads the data, not {num_workers} (--num-workers): with --context-window {context_window} each block "
            "needs the one before it; stock fairseq would give blocks the context of others"
        )
    return {"num_workers": min(num_workers, 1)}
