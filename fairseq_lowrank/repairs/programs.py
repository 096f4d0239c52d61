"""The commands of fairseq, told by their parsed arguments."""

import argparse
from enum import Enum


class Program(Enum):
    """A command of fairseq, with a flag that no command before it has."""

    TRAIN = "max_update"
    INTERACTIVE = "buffer_size"
    EVAL_LM = "context_window"
    GENERATE = "beam"
    VALIDATE = "path"


EVALUATING = frozenset(Program) - {Program.TRAIN}
"""The commands that load a checkpoint and train nothing."""


def program_of(args: argparse.Namespace) -> Program | None:
    """Return the command that parsed these arguments; None for one that has no model, such as fairseq-preprocess."""
    return next((program for program in Program if hasattr(args, program.value)), None)
