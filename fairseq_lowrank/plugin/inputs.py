"""What fairseq's commands are told to read, and in what portions, checked before they write anything."""

import argparse
import codecs
import math
import os
from collections.abc import Iterator

from fairseq import tasks, utils
from fairseq.file_io import PathManager
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.translation import TranslationTask


def unusable_for_training(args: argparse.Namespace) -> str | None:
    """Why training cannot begin, or None."""
    for rate in args.lr:
        if not 0 <= rate < math.inf:
            return f"--lr {rate:g}: expected a number >= 0"
    for every in args.update_freq:
        if every < 1:
            return f"--update-freq {every}: expected a number >= 1"
    return unusable_portions(args) or missing_data(args)


def unusable_for_evaluation(args: argparse.Namespace) -> str | None:
    """Why fairseq-generate, -interactive, -eval-lm or -validate has no model or no data, or None."""
    if args.path is None:
        return "--path is missing: expected a checkpoint, such as checkpoints/checkpoint_best.pt"
    shards = getattr(args, "checkpoint_suffix", ""), getattr(args, "checkpoint_shard_count", 1)
    if shards == ("", 1):  # whose names are not those given
        for path in utils.split_paths(args.path):
            if not PathManager.isfile(path):
                return f"--path {path}: expected a checkpoint, and there is no such file"
    return unusable_portions(args) or missing_data(args)


# With a batch of 0 sentences fairseq makes batches for ever; of a block of 0 tokens it speaks as of long ones.
def unusable_portions(args: argparse.Namespace) -> str | None:
    """Which number of tokens or sentences is none, or None."""
    for name in (
        "max_tokens",
        "max_tokens_valid",
        "batch_size",
        "batch_size_valid",
        "tokens_per_sample",
        "beam",
        "nbest",
    ):
        if (number := getattr(args, name, None)) is not None and number < 1:
            return f"--{name.replace('_', '-')} {number}: expected a number >= 1"
    if args.num_workers < 0:
        return f"--num-workers {args.num_workers}: expected a number >= 0"
    return None


def missing_data(args: argparse.Namespace) -> str | None:
    """Which folder of data is not there, for tasks that read what fairseq-preprocess writes; or None."""
    if issubclass(tasks.TASK_REGISTRY.get(args.task, object), TranslationTask | LanguageModelingTask):
        for folder in utils.split_paths(args.data or ""):
            if not PathManager.exists(folder):
                return f"{folder}: expected a folder that fairseq-preprocess wrote, and there is none"
    return None


def unusable_for_preprocessing(args: argparse.Namespace) -> str | None:
    """Why fairseq-preprocess would stop half-way: texts that are not there or not UTF-8, dictionaries that are; or None."""
    for flag in () if args.srcdict or args.trainpref else ("--trainpref",):
        return f"{flag} is missing: expected the beginning of the training texts' names, or --srcdict"
    languages = [args.source_lang] if args.only_source else [args.source_lang, args.target_lang]
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
