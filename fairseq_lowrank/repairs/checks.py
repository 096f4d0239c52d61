"""Checks of flags with which plain training or a score would be wrong in silence. Everything else ends in fairseq's own error."""

import argparse
import logging
import os
from pathlib import Path

from fairseq import utils
from fairseq.data import data_utils
from fairseq.file_io import PathManager
from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.translation import TranslationTask

from fairseq_lowrank.messages import UserError, flag_name
from fairseq_lowrank.repairs.programs import EVALUATING, Program, program_of
from fairseq_lowrank.subwords import kind_of_dictionary

logger = logging.getLogger(__name__)


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


def check_first_file(args: argparse.Namespace) -> None:
    """Refuse ``--finetune-from-model`` and ``--continue-once`` without such a file, unless the training resumes."""
    if program_of(args) is not Program.TRAIN:
        return
    last = os.path.join(args.save_dir, f"checkpoint_last{args.checkpoint_suffix}.pt")
    for name in ("finetune_from_model", "continue_once"):
        path = getattr(args, name, None)
        if path is not None and not PathManager.exists(last) and not PathManager.isfile(path):
            raise UserError(f"{flag_name(name)} {path}: no such file. Give the path of a checkpoint.")


def check_best_metric(args: argparse.Namespace) -> None:
    """Warn if a training would take its lowest BLEU or accuracy as the best."""
    metric = getattr(args, "best_checkpoint_metric", None)
    if metric in ("bleu", "accuracy") and not (args.maximize_best_checkpoint_metric or args.disable_validation):
        logger.warning(
            f"--best-checkpoint-metric {metric}: the lowest value counts as the best. Add --maximize-best-checkpoint-metric."
        )


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
    folder = Path(next(iter(utils.split_paths(args.data or "")), ""))
    target = args.target_lang or (data_utils.infer_language_pair(folder)[1] if folder.is_dir() else None)
    dictionary = folder / f"dict.{target}.txt"
    if dictionary.is_file() and (kind := kind_of_dictionary(dictionary)):
        logger.warning(f"BLEU will count subwords, not words, and be no BLEU of other papers. Add {flag} {kind}.")


CHECKS = (
    check_restored_file,
    check_first_file,
    check_best_metric,
    check_joined_subwords,
    warn_of_bleu_of_subwords,
)
