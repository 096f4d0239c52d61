"""What fairseq's commands evaluate: all of it, in the precision that was asked for."""

import functools

from fairseq import models, options, trainer
from fairseq.tasks import language_modeling

from fairseq_lowrank.plugin.arguments import is_training
from fairseq_lowrank.plugin.loading import Refused


# fairseq's commands take --bf16 when they generate, score or serve, and then compute in float32. They alone are told a
# path: a model that comes by from_pretrained has the configuration of its training.
def evaluate_in_bfloat16() -> None:
    """Let ``--bf16`` mean bfloat16 in fairseq-generate, -interactive and -eval-lm, as ``--fp16`` means float16."""
    prepare = models.BaseFairseqModel.prepare_for_inference_

    @functools.wraps(prepare)
    def prepare_for_inference_(self, cfg):
        if cfg.common.bf16 and cfg.common_eval.path is not None:
            self.bfloat16()
        prepare(self, cfg)

    models.BaseFairseqModel.prepare_for_inference_ = prepare_for_inference_


# --required-batch-size-multiple, 8 by default, drops the last batch unless its size is a multiple: of a test set of 12
# sentences fairseq-generate translates 8. Training is left as it is, so that it stays comparable with stock fairseq's.
def evaluate_every_sentence() -> None:
    """Let fairseq's commands and its validation during training see every sentence of what they evaluate."""
    parse, get_valid_iterator = options.parse_args_and_arch, trainer.Trainer.get_valid_iterator

    @functools.wraps(parse)
    def parse_args_and_arch(*args, **kwargs):
        parsed = parse(*args, **kwargs)
        arguments = parsed[0] if isinstance(parsed, tuple) else parsed
        if not is_training(arguments):
            arguments.required_batch_size_multiple = 1
        return parsed

    @functools.wraps(get_valid_iterator)
    def get_whole_valid_iterator(self, *args, **kwargs):
        dataset = self.cfg.dataset
        multiple, dataset.required_batch_size_multiple = dataset.required_batch_size_multiple, 1
        try:
            return get_valid_iterator(self, *args, **kwargs)
        finally:
            dataset.required_batch_size_multiple = multiple

    options.parse_args_and_arch = parse_args_and_arch
    trainer.Trainer.get_valid_iterator = get_whole_valid_iterator


# fairseq-eval-lm leaves out the blocks that are too long for the model, with a warning, and reports the perplexity
# of the rest: 1.00 when nothing is left.
def evaluate_every_block() -> None:
    """Let ``fairseq-eval-lm`` refuse blocks longer than the model accepts instead of leaving them out."""
    task = language_modeling.LanguageModelingTask
    load, dataloader = task.load_dataset, task.eval_lm_dataloader

    @functools.wraps(load)
    def load_dataset(self, split, *args, **kwargs):
        if (block := self.args.tokens_per_sample) is not None and block < 1:
            raise Refused(f"blocks of {block} tokens: --tokens-per-sample must be above --context-window, and above 0")
        return load(self, split, *args, **kwargs)

    @functools.wraps(dataloader)
    def eval_lm_dataloader(self, dataset, *args, max_positions=None, context_window=0, **kwargs):
        # the window stands before every block but the first
        window = context_window if len(dataset) > 1 else 0
        longest = max(dataset.sizes, default=0) + window
        if max_positions is not None and longest > max_positions:
            count = sum(size + window > max_positions for size in dataset.sizes)
            raise Refused(
                f"{count} of {len(dataset)} blocks are longer than the {max_positions} tokens the model accepts (the "
                f"longest has {longest}, the context window among them) and would be left out of the perplexity or cut "
                "short. Lower --tokens-per-sample or raise max_target_positions in --model-overrides"
            )
        return dataloader(self, dataset, *args, max_positions=max_positions, context_window=context_window, **kwargs)

    task.load_dataset, task.eval_lm_dataloader = load_dataset, eval_lm_dataloader
