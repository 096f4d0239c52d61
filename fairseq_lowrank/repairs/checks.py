"""Checks for everyday mistakes on the command line. Each ends in a one-line error before anything is written."""

import argparse
import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from fairseq import utils
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.data import data_utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.file_io import PathManager
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.models.nat import FairseqNATModel
from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.translation import TranslationTask
from fairseq.tasks.translation_lev import TranslationLevenshteinTask

from fairseq_lowrank.messages import FlagError, UserError, did_you_mean, flag_name
from fairseq_lowrank.repairs.literals import FASTA
from fairseq_lowrank.repairs.loading import load_checkpoint
from fairseq_lowrank.repairs.programs import EVALUATING, Program, program_of
from fairseq_lowrank.subwords import kind_of_dictionary

logger = logging.getLogger(__name__)

PYTORCH_DDP = "pytorch_ddp", "c10d"
"""The values of --ddp-backend that stand for PyTorch's own workers, two names of one."""


def check_precision(args: argparse.Namespace) -> None:
    """Refuse half precision for a training on the CPU: fairseq fails at an overflow, or trains in float32 without a message."""
    if program_of(args) is Program.TRAIN and (args.cpu or not torch.cuda.is_available()):
        flags = ("amp", "memory_efficient_fp16", "fp16")
        if flag := next((flag_name(name) for name in flags if getattr(args, name)), None):
            raise UserError(f"{flag}: needs a GPU. Use --bf16, which works on the CPU too.")


def check_path(args: argparse.Namespace) -> None:
    """Refuse an evaluation without a checkpoint."""
    program = program_of(args)
    if program not in EVALUATING:
        return
    if args.path is None:
        raise UserError("--path: missing. Add a checkpoint, such as --path checkpoints/checkpoint_best.pt.")
    in_one_file = not getattr(args, "checkpoint_suffix", "") and getattr(args, "checkpoint_shard_count", 1) == 1
    several = program in (Program.GENERATE, Program.INTERACTIVE)
    for path in utils.split_paths(args.path) if several else [args.path]:
        if in_one_file and not PathManager.isfile(path):
            raise UserError(f"--path {path}: no such file. Give the path of a checkpoint.")


def check_data(args: argparse.Namespace) -> None:
    """Refuse a folder of data that does not exist or has no dictionary."""
    task, folders = (
        TASK_REGISTRY.get(getattr(args, "task", None), object),
        utils.split_paths(getattr(args, "data", None) or ""),
    )
    if not issubclass(task, TranslationTask | LanguageModelingTask):
        return
    for folder in folders:
        if not PathManager.exists(folder):
            raise UserError(f"{folder}: no such folder. Give a folder that fairseq-preprocess wrote.")
    names = ["dict.txt"]
    if issubclass(task, TranslationTask):
        pair = args.source_lang, args.target_lang
        if None in pair:
            pair = data_utils.infer_language_pair(folders[0])
        if None in pair:
            raise UserError(f"{folders[0]}: has no data of a language pair. Give another folder, or add -s and -t.")
        names = [f"dict.{language}.txt" for language in pair]
    for name in names:
        if not PathManager.exists(os.path.join(folders[0], name)):
            raise UserError(
                f"{folders[0]}: has no {name}. Check the folder and the languages, or run fairseq-preprocess."
            )


def model_class(name: str | None) -> type | None:
    """Return the class of a registered architecture or model."""
    return ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY.get(name)


def check_model_of_task(args: argparse.Namespace) -> None:
    """Refuse a model that does not work with the task of a training."""
    model, task = model_class(getattr(args, "arch", None)), TASK_REGISTRY.get(getattr(args, "task", None), object)
    if model is None or program_of(args) is not Program.TRAIN:
        return
    if issubclass(task, LanguageModelingTask):
        refuse_other_than_language_model(args.arch, f"--task {args.task}")
    if issubclass(model, FairseqNATModel) and not issubclass(task, TranslationLevenshteinTask):
        raise UserError(f"--task {args.task}: does not work with --arch {args.arch}. Use --task translation_lev.")


def check_language_model_path(args: argparse.Namespace) -> None:
    """Refuse a checkpoint in ``--lm-path`` that is not a language model."""
    if path := getattr(args, "lm_path", None):
        state = load_checkpoint(path)
        options = (state.get("cfg") or {}).get("model") or state.get("args")
        names = options if isinstance(options, Mapping) else vars(options)
        refuse_other_than_language_model(names.get("arch") or names.get("_name"), f"--lm-path {path}")


def refuse_other_than_language_model(name: str | None, given: str) -> None:
    """Refuse a registered model that is not a language model."""
    if (model := model_class(name)) is not None and not hasattr(model, "supported_targets"):
        raise UserError(f"{given}: {name} is not a language model. Use one, such as transformer_lm.")


def check_joined_subwords(args: argparse.Namespace) -> None:
    """Refuse an evaluation that joins subwords twice: the second time removes the blanks between words."""
    flag, bpe = getattr(args, "post_process", None), getattr(args, "bpe", None)
    if program_of(args) not in EVALUATING or flag is None or bpe is None:
        return
    if flag not in ("none", "subword_nmt", "@@ ", "@@") and bpe != "subword_nmt":
        raise UserError(
            f"--remove-bpe {flag}: --bpe {bpe} joins subwords too, and together they remove every blank. Remove --remove-bpe."
        )


def warn_of_bleu_of_subwords(args: argparse.Namespace) -> None:
    """Warn if fairseq-generate, or ``--eval-bleu`` in a training, would compute BLEU of subwords."""
    if getattr(args, "eval_bleu", False):
        flag, joined = "--eval-bleu-remove-bpe", args.eval_bleu_remove_bpe
    elif program_of(args) is Program.GENERATE:
        flag, joined = "--remove-bpe", getattr(args, "post_process", None) or args.bpe
    else:
        return
    if joined or not issubclass(TASK_REGISTRY.get(args.task, object), TranslationTask):
        return
    folder = utils.split_paths(args.data)[0]
    target = args.target_lang or data_utils.infer_language_pair(folder)[1]
    if kind := kind_of_dictionary(Path(folder) / f"dict.{target}.txt"):
        logger.warning(f"BLEU will count subwords, not words, and be no BLEU of other papers. Add {flag} {kind}.")


def check_best_metric(args: argparse.Namespace) -> None:
    """Refuse the metric ``bleu`` of a training that computes no BLEU, and warn if the lowest BLEU or accuracy would be the best."""
    if program_of(args) is not Program.TRAIN or args.disable_validation:
        return
    metric = args.best_checkpoint_metric
    if metric == "bleu" and not getattr(args, "eval_bleu", True):
        raise UserError("--best-checkpoint-metric bleu: the training computes no BLEU. Add --eval-bleu.")
    if metric in ("bleu", "accuracy") and not args.maximize_best_checkpoint_metric:
        logger.warning(
            f"--best-checkpoint-metric {metric}: the lowest value counts as the best. Add --maximize-best-checkpoint-metric."
        )


SEARCH = {setting.name for setting in dataclasses.fields(GenerationConfig)}
"""The names of all settings of a search."""


def check_arguments_of_bleu(args: argparse.Namespace) -> None:
    """Refuse arguments of ``--eval-bleu`` that are not JSON, and name settings that no search has, which fairseq ignores."""
    if not getattr(args, "eval_bleu", False):
        return
    for name in ("eval_bleu_args", "eval_bleu_detok_args"):
        text = getattr(args, name, None) or "{}"
        try:
            settings = json.loads(text)
        except ValueError:
            settings = None
        if not isinstance(settings, dict):
            remedy = """Write names in double quotes, such as '{"beam": 5}'."""
            raise FlagError(flag_name(name), text, "expected a dictionary in JSON", remedy)
        for unknown in [key for key in settings if name == "eval_bleu_args" and key not in SEARCH]:
            logger.warning(
                f"{flag_name(name)}: a search has no setting {unknown!r}, so it is ignored.{did_you_mean(unknown, SEARCH)}"
            )


def check_criterion_of_adaptive_softmax(args: argparse.Namespace) -> None:
    """Refuse a training of an adaptive softmax by cross entropy, which has no gradient in fairseq, and adaptive_loss without one."""
    criterion = CRITERION_REGISTRY.get(getattr(args, "criterion", None), object)
    usual, adaptive = (CrossEntropyCriterion, LabelSmoothedCrossEntropyCriterion), issubclass(criterion, AdaptiveLoss)
    if program_of(args) is not Program.TRAIN or not (adaptive or issubclass(criterion, usual)):
        return
    cutoff = getattr(args, "adaptive_softmax_cutoff", None)
    has_softmax = bool(cutoff and utils.eval_str_list(cutoff, type=int))
    if has_softmax and not adaptive:
        raise UserError(
            f"--criterion {args.criterion}: does not train an adaptive softmax (--adaptive-softmax-cutoff, or the default of "
            f"--arch {args.arch}). Use --criterion adaptive_loss, with --ddp-backend legacy_ddp."
        )
    if adaptive and not has_softmax and hasattr(args, "adaptive_softmax_cutoff"):
        raise UserError(
            f"--criterion {args.criterion}: trains an adaptive softmax alone. Add --adaptive-softmax-cutoff, or use --criterion "
            "cross_entropy."
        )
    if adaptive and args.ddp_backend in PYTORCH_DDP:
        raise UserError(
            f"--criterion {args.criterion}: does not work with --ddp-backend {args.ddp_backend}, fairseq's default, also with one "
            "worker. Use --ddp-backend legacy_ddp."
        )


def check_format_of_data(args: argparse.Namespace) -> None:
    """Refuse a format of data that fairseq reads by a shell."""
    if getattr(args, "dataset_impl", None) == "fasta":
        raise UserError(f"{FASTA}: fairseq reads this format by a shell. Use mmap or raw.")


def check_finetuning(args: argparse.Namespace) -> None:
    """Refuse ``--finetune-from-model`` without such a file, which fairseq leaves out if it is a folder, or with flags to resume."""
    path = getattr(args, "finetune_from_model", None)
    if path is None or program_of(args) is not Program.TRAIN:
        return
    names = ("reset_optimizer", "reset_lr_scheduler", "reset_meters", "reset_dataloader")
    resuming = [flag_name(name) for name in names if getattr(args, name)]
    if args.restore_file != "checkpoint_last.pt":
        resuming.append("--restore-file")
    if resuming:
        raise UserError(f"{resuming[0]}: does not work with --finetune-from-model {path}. Remove one of the two.")
    last = os.path.join(args.save_dir, f"checkpoint_last{args.checkpoint_suffix}.pt")
    if not PathManager.exists(last) and not PathManager.isfile(path):
        raise UserError(f"--finetune-from-model {path}: no such file. Give the path of a checkpoint.")


# fairseq trains from scratch then. A script that is run again may name a file that it has not written yet.
def check_restored_file(args: argparse.Namespace) -> None:
    """Refuse ``--restore-file`` without such a file, unless its folder is that of ``--save-dir``."""
    if program_of(args) is not Program.TRAIN or args.restore_file == "checkpoint_last.pt":
        return
    path = args.restore_file.replace(".pt", f"{args.checkpoint_suffix}.pt")
    in_one_file = not getattr(args, "base_layers", 0) and not args.use_sharded_state
    own = os.path.realpath(os.path.dirname(path)) == os.path.realpath(args.save_dir)
    if in_one_file and not own and not PathManager.isfile(path):
        saved = os.path.join(args.save_dir, path)
        remedy = f"Did you mean {saved}?" if PathManager.isfile(saved) else "Give the path of a checkpoint."
        raise UserError(f"--restore-file {args.restore_file}: no such file. {remedy}")


CHECKS = (
    check_format_of_data,
    check_criterion_of_adaptive_softmax,
    check_precision,
    check_path,
    check_finetuning,
    check_restored_file,
    check_best_metric,
    check_arguments_of_bleu,
    check_data,
    check_model_of_task,
    check_language_model_path,
    check_joined_subwords,
    warn_of_bleu_of_subwords,
)
