"""What fairseq's commands are told to read, and in what portions, checked before they write anything."""

import argparse
import codecs
import functools
import math
import os
from collections.abc import Iterator

from fairseq import tasks, utils
from fairseq.data import data_utils
from fairseq.file_io import PathManager
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.translation import TranslationTask

from fairseq_lowrank.messages import UserError


def unusable_for_training(args: argparse.Namespace) -> str | None:
    """Why training cannot begin, or None."""
    for rate in args.lr:
        if not 0 <= rate < math.inf:
            return f"--lr {rate:g}: expected a number >= 0"
    for every in args.update_freq:
        if every < 1:
            return f"--update-freq {every}: expected a number >= 1"
    portions = unusable_portions(args) or too_short_for_blocks(args)
    return portions or missing_data(args) or missing_checkpoint(args) or unknown_metric(args)


# fairseq leaves the blocks out, with a warning, and then lacks a batch.
def too_short_for_blocks(args: argparse.Namespace) -> str | None:
    """Why a language model takes none of the blocks of its text but the last one, or None."""
    if not issubclass(tasks.TASK_REGISTRY.get(args.task, object), LanguageModelingTask):
        return None
    length, positions = args.tokens_per_sample, getattr(args, "max_target_positions", None)
    if positions is None or positions < 1 or args.sample_break_mode not in (None, "none") or positions >= length:
        return None
    return f"--max-target-positions {positions}: expected a number >= {length}, the --tokens-per-sample of each block"


def missing_checkpoint(args: argparse.Namespace) -> str | None:
    """Which checkpoint to restore is not there, where fairseq would begin anew with a line in its log; or None."""
    if args.restore_file == "checkpoint_last.pt" or args.checkpoint_suffix or args.use_sharded_state:
        return None  # of a first call, or under other names
    if PathManager.isfile(args.restore_file):
        return None
    return f"--restore-file {args.restore_file}: expected a checkpoint, and there is no such file"


METRICS = ("loss", "nll_loss", "ppl", "num_updates", "wps", "wpb", "bsz")


def unknown_metric(args: argparse.Namespace) -> str | None:
    """Which metric the first validation would fail to find, of tasks and criterions whose metrics are known; or None."""
    from fairseq_lowrank.plugin.criterions import REGULARISERS  # registers models, which come after the repairs

    simple = ("cross_entropy", "label_smoothed_cross_entropy", "adaptive_loss")
    if args.disable_validation or args.task not in ("translation", "language_modeling") or args.criterion not in simple:
        return None
    metrics = [name for name in METRICS if name != "nll_loss" or has_nll_loss(args)]
    metrics += [*(name for name in REGULARISERS if getattr(args, name, 0))]
    metrics += ["bleu"] if getattr(args, "eval_bleu", False) else []
    metrics += ["accuracy", "n_correct", "total"] if getattr(args, "report_accuracy", False) else []
    if (metric := args.best_checkpoint_metric) in metrics:
        return None
    also = " (bleu needs --eval-bleu)" if metric == "bleu" else ""
    return f"--best-checkpoint-metric {metric}: expected one of {', '.join(metrics)}{also}"


def has_nll_loss(args: argparse.Namespace) -> bool:
    """Whether validation logs it: of these criterions those whose loss is another, or a mean over sentences."""
    return args.criterion == "label_smoothed_cross_entropy" or bool(getattr(args, "sentence_avg", False))


def unusable_for_evaluation(args: argparse.Namespace) -> str | None:
    """Why fairseq-generate, -interactive, -eval-lm or -validate has no model or no data, or None."""
    if args.path is None:
        return "--path is missing: expected a checkpoint, such as checkpoints/checkpoint_best.pt"
    shards = getattr(args, "checkpoint_suffix", ""), getattr(args, "checkpoint_shard_count", 1)
    if shards == ("", 1):  # whose names are not those given
        for path in utils.split_paths(args.path):
            if not PathManager.isfile(path):
                return f"--path {path}: expected a checkpoint, and there is no such file"
    if (text := getattr(args, "input", "-")) != "-" and (reason := unreadable(text)):
        return f"--input {reason}"
    if not 0 <= (shard := getattr(args, "shard_id", 0)) < (shards := getattr(args, "num_shards", 1)):
        return f"--shard-id {shard} --num-shards {shards}: expected shards from 0 to below their number"
    return unusable_portions(args) or missing_data(args)


# With batches of 0 sentences fairseq makes batches for ever, with 0 workers it trains nothing and says nothing, and
# every 0 updates it divides by zero once it has trained.
AT_LEAST_ONE = (
    *("max_tokens", "max_tokens_valid", "batch_size", "batch_size_valid", "tokens_per_sample", "beam", "nbest"),
    *("distributed_world_size", "log_interval", "save_interval", "validate_interval"),
)


def unusable_portions(args: argparse.Namespace) -> str | None:
    """Which number of tokens, sentences, workers or updates is none, or None."""
    for name in AT_LEAST_ONE:
        if (number := getattr(args, name, None)) is not None and not _is_at_least_one(number):
            return f"--{name.replace('_', '-')} {number}: expected a number >= 1"
    if args.num_workers < 0:
        return f"--num-workers {args.num_workers}: expected a number >= 0"
    return None


def _is_at_least_one(number: int | str) -> bool:
    # fairseq reads a flag as text where its default is another flag's value, as that of --batch-size-valid is
    try:
        return float(number) >= 1
    except ValueError:
        return False


# fairseq leaves out what is too long, with a warning, and looks for the last batch where none is.
def name_empty_subsets() -> None:
    """Say in one line that no sentence of a subset is short enough, or that there are too few."""
    batch = data_utils.batch_by_size

    @functools.wraps(batch)
    def batch_by_size(indices, *args, **kwargs):
        try:
            batches = batch(indices, *args, **kwargs)
            if len(indices) and not len(batches):
                raise UserError(
                    f"{len(indices)} sentences make no batch: fairseq wants multiples of --required-batch-size-multiple; "
                    "expected more of them, or --required-batch-size-multiple 1"
                )
            return batches
        except IndexError as error:
            if len(indices):
                raise
            raise UserError(
                "no sentence or block of the data is left: each is longer than --max-tokens, --max-source-positions or "
                "--max-target-positions allow, or there is none"
            ) from error

    data_utils.batch_by_size = batch_by_size


def missing_data(args: argparse.Namespace) -> str | None:
    """Which folder of data is not there, for tasks that read what fairseq-preprocess writes; or None."""
    if issubclass(tasks.TASK_REGISTRY.get(args.task, object), TranslationTask | LanguageModelingTask):
        for folder in utils.split_paths(args.data or ""):
            if not PathManager.exists(folder):
                return f"{folder}: expected a folder that fairseq-preprocess wrote, and there is none"
    return None


def unusable_for_preprocessing(args: argparse.Namespace) -> str | None:
    """Why fairseq-preprocess would stop half-way: texts that are not there or not UTF-8, dictionaries that are; or None."""
    if not args.trainpref and not args.srcdict:
        return "--trainpref is missing: expected the beginning of the training texts' names, or --srcdict"
    if not args.only_source and not (args.source_lang and args.target_lang):
        return "--source-lang and --target-lang, the endings of the texts' names, are missing: expected both, or --only-source"
    if args.workers < 1:
        return f"--workers {args.workers}: expected a number >= 1"
    languages = [args.source_lang] if args.only_source else [args.source_lang, args.target_lang]
    if os.path.exists(args.destdir) and not os.path.isdir(args.destdir):
        return f"--destdir {args.destdir}: expected a folder, and it is a file"
    for language, given in zip(languages, (args.srcdict, args.tgtdict), strict=False):
        dictionary = os.path.join(args.destdir, f"dict.{language}.txt" if language else "dict.txt")
        if not given and os.path.exists(dictionary):
            return f"{dictionary} is there already: expected another --destdir, or this dictionary as --srcdict or --tgtdict"
    for given in filter(None, (args.srcdict, args.tgtdict)):
        if not os.path.isfile(given):
            return f"{given}: expected a dictionary, and there is no such file"
    for path in texts(args, languages):
        if reason := unreadable(path):
            return reason
    return None


def texts(args: argparse.Namespace, languages: list[str | None]) -> Iterator[str]:
    """The names of the texts that fairseq-preprocess reads."""
    for prefixes in (args.trainpref, args.validpref, args.testpref):
        for prefix in (prefixes or "").split(",") if prefixes else ():
            for language in languages:
                yield f"{prefix}.{language}" if language else prefix


def unreadable(path: str) -> str | None:
    """Why a text cannot be read, or None."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                line += decoder.decode(block).count("\n")
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        line += error.object[: error.start].count(b"\n")
        return f"{path}: expected text in UTF-8, and line {line} is not"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None
