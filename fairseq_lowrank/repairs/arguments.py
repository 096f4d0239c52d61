"""Wrappers of fairseq's parser that change parsed arguments and check a command line."""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.repairs import checks, user_dir
from fairseq_lowrank.repairs.literals import literal


@dataclass(frozen=True)
class CommandLine:
    """A command line that fairseq parses.

    Args:
        words: its words; None for those of this process.
        suppress_defaults: True if flags without a value stay unset.
    """

    words: Sequence[str] | None = None
    suppress_defaults: bool = False

    def has(self, flag: str) -> bool:
        """Return True if the flag, with its dashes, is on the command line."""
        words = sys.argv[1:] if self.words is None else self.words
        return any(str(word).partition("=")[0] == flag for word in words)


Prepare = Callable[[argparse.ArgumentParser, CommandLine, Callable | None], Callable | None]
"""A function that may change a parser. It takes and returns fairseq's `modify_parser`."""
Finish = Callable[[argparse.Namespace, CommandLine], None]
"""A function that checks or changes parsed arguments."""
Explain = Callable[[Exception], UserError | None]
"""A function that returns the message for an error of the parser, if it knows the error."""


def parsing(
    *, prepare: Prepare | None = None, finish: Finish | None = None, explain: Explain | None = None
) -> Callable[[Callable], Callable]:
    """Return a wrapper of ``options.parse_args_and_arch``, the one place where commands parse, with a step of ours."""

    def wrap(parse: Callable) -> Callable:
        @functools.wraps(parse)
        def parse_args_and_arch(parser, input_args=None, *args, suppress_defaults=False, modify_parser=None, **kwargs):
            line = CommandLine(input_args, suppress_defaults)
            modify = modify_parser if prepare is None else prepare(parser, line, modify_parser)
            kwargs |= {"suppress_defaults": suppress_defaults, "modify_parser": modify}
            try:
                parsed = parse(parser, input_args, *args, **kwargs)
            except (KeyError, RuntimeError) as error:
                if explain is None or (mistake := explain(error)) is None:
                    raise
                raise mistake from error
            if finish is not None:
                finish(parsed[0] if isinstance(parsed, tuple) else parsed, line)
            return parsed

        return parse_args_and_arch

    return wrap


def name_missing_flags(error: Exception) -> UserError | None:
    """Return the message for a command line without ``--arch`` or ``--task``."""
    if isinstance(error, RuntimeError) and not error.args:
        return UserError("--arch: missing. Add an architecture, such as lowrank_transformer_iwslt_de_en.")
    if isinstance(error, KeyError) and error.args == (None,):
        return UserError("--task: missing. Add the task of the training, such as translation.")
    return None


def check_command_line(args: argparse.Namespace, line: CommandLine) -> None:
    """Check the flags of a command. A program that passes arguments is not checked."""
    if line.words is None and not line.suppress_defaults:
        for check in checks.CHECKS:
            check(args)


SECTIONS = ("common", "distributed_training", "dataset", "optimization", "checkpoint", "task", "model", "criterion")
"""The parts of a configuration that a training reads."""


def arguments_of(cfg: DictConfig) -> argparse.Namespace:
    """Return the settings of a training as arguments, with the names of its task, model and criterion."""
    parts = {name: cfg.get(name) for name in SECTIONS}
    values: dict[str, object] = {}
    for part in parts.values():
        values |= vars(part) if isinstance(part, argparse.Namespace) else part or {}
    for section, flag in {"task": "task", "model": "arch", "criterion": "criterion"}.items():
        values[flag] = getattr(parts[section], "_name", None) or getattr(parts[section], "arch", None)
    return argparse.Namespace(**values)


def check_configuration(add_defaults: Callable) -> Callable:
    """Wrap ``add_defaults``: check the configuration of fairseq-hydra-train like a command line."""

    @functools.wraps(add_defaults)
    def add_and_check(cfg):
        add_defaults(cfg)
        if HydraConfig.initialized() and user_dir.is_imported(cfg.common.user_dir):
            arguments = arguments_of(cfg)
            for check in checks.CHECKS:
                check(arguments)

    # If --user-dir imports this package, the command has imported the function by its name.
    for name in ("fairseq_cli.train", "fairseq_cli.hydra_train"):
        if name in sys.modules:
            vars(sys.modules[name])["add_defaults"] = add_and_check
    return add_and_check


# fairseq's parser takes --bf16 to mean "on a TPU" and then asks for torch_xla, on GPUs and CPUs too.
def bf16_without_tpu(args: argparse.Namespace, line: CommandLine) -> None:
    """Turn ``--tpu`` off in parsed arguments unless it is given: fairseq sets it with ``--bf16``."""
    if getattr(args, "bf16", False):
        args.tpu = line.has("--tpu")


# fairseq passes this text to eval.
def literal_overrides(args: argparse.Namespace, line: CommandLine) -> None:
    """Refuse ``--model-overrides`` that is not a dictionary.

    Raises:
        UserError: the value is not a dictionary.
    """
    text = getattr(args, "model_overrides", "{}")
    try:
        if isinstance(literal(text), dict):
            return
    except UserError:
        pass
    raise UserError(f"--model-overrides {text[:200]!r}: expected a dictionary, such as {{'dropout': 0.1}}.")
