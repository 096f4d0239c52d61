"""A line where fairseq takes tokens and prepared data says that its tokens were made from raw text (text.json)."""

import argparse
import functools
import logging
from collections.abc import Callable
from pathlib import Path

from fairseq import utils
from fairseq.tasks.translation import TranslationTask

from fairseq_lowrank.raw_text import SETTINGS, TextSettings
from fairseq_lowrank.repairs.arguments import CommandLine
from fairseq_lowrank.repairs.programs import Program, program_of

logger = logging.getLogger(__name__)


def warn_of_raw_text(folder: Path, bpe: str | None, tokenizer: str | None) -> None:
    """Warn that the data in a folder was tokenised or cut into subwords, and that a model would get raw text."""
    settings = TextSettings.load(folder) if (folder / SETTINGS).is_file() else None
    if settings is None:
        return
    steps = ["tokenised"] * bool(settings.moses and not tokenizer)
    if settings.subwords and not bpe:
        steps.append(f"cut into subwords of {settings.subwords}")
    if steps:
        logger.warning(
            f"The text in {folder} was {' and '.join(steps)}, and this reads and prints such tokens. For raw text, use "
            "fairseq-lowrank translate, or Translator in Python."
        )


def check_raw_text(args: argparse.Namespace, line: CommandLine) -> None:
    """Warn if fairseq-interactive gets raw text as tokens."""
    if program_of(args) is Program.INTERACTIVE and args.data:
        warn_of_raw_text(Path(utils.split_paths(args.data)[0]), args.bpe, args.tokenizer)


def check_raw_text_of_programs(init: Callable) -> Callable:
    """Wrap ``GeneratorHubInterface.__init__``, of ``from_pretrained``: warn if ``translate`` gets raw text as tokens."""

    @functools.wraps(init)
    def __init__(self, cfg, task, models):
        init(self, cfg, task, models)
        if isinstance(task, TranslationTask) and task.cfg.data:
            warn_of_raw_text(Path(utils.split_paths(task.cfg.data)[0]), self.bpe, self.tokenizer)

    return __init__
