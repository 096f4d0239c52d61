"""Our flags in fairseq's commands: ``--help`` shows them, and those that do not work are refused before data is read."""

import argparse
import functools
from collections.abc import Callable

from fairseq import criterions
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.tasks import TASK_REGISTRY

from fairseq_lowrank.plugin import architectures, flags
from fairseq_lowrank.repairs.arguments import CommandLine
from fairseq_lowrank.repairs.programs import Program, program_of


def read_new_methods(load: Callable) -> Callable:
    """Wrap ``import_user_module``: offer the flags of methods that a user's plugin registers."""

    @functools.wraps(load)
    def import_user_module(args: argparse.Namespace) -> None:
        load(args)
        if flags.read_registry():
            flags.extend_registered_models()

    return import_user_module


# fairseq parses twice, the second time with the flags of the chosen model, task, criterion and optimizer, and would
# print --help the first time, without them.
def complete_help(
    parser: argparse.ArgumentParser, line: CommandLine, modify_parser: Callable | None
) -> Callable | None:
    """Let ``--help`` show the flags of the chosen ``--arch``, ``--task`` …, and ours."""
    return _help_second(parser, modify_parser) if line.has("--help") or line.has("-h") else modify_parser


def _help_second(parser: argparse.ArgumentParser, modify_parser: Callable | None) -> Callable:
    """Return a function that fairseq calls before each parsing; in the first parsing, ``--help`` does nothing."""
    print_help, leave, first = parser.print_help, parser.exit, True

    def modify(parser: argparse.ArgumentParser) -> None:
        nonlocal first
        methods: dict[str, Callable] = {"print_help": print_help, "exit": leave}
        if first:
            methods = {
                "print_help": lambda: None,
                "exit": lambda status=0, *message: status and leave(status, *message),
            }
        vars(parser).update(methods)
        if first and any(action.dest == "arch" and action.default is None for action in parser._actions):
            parser.set_defaults(arch="lowrank_transformer")
        first = False
        if modify_parser is not None:
            modify_parser(parser)

    return modify


# Without this, a model, task or criterion refuses its flags only when it is built, after data is read.
def check_our_flags(args: argparse.Namespace, line: CommandLine) -> None:
    """Check that our flags work with the model, task and criterion of a training.

    Raises:
        UserError: see ``check_args`` of models and criterions, and ``check_model`` of tasks.
    """
    if program_of(args) is not Program.TRAIN:
        return
    if (model := ARCH_MODEL_REGISTRY.get(getattr(args, "arch", None))) is not None:
        config = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(args.arch))
        model_args = args if config is None else config.from_namespace(args)
        architectures.check_args(model, model_args)
        if _is_ours(model, "check_args"):
            model.check_args(model_args)
        if _is_ours(task := TASK_REGISTRY.get(args.task), "check_model"):
            task.check_model(model, args)
    if _is_ours(criterion := criterions.CRITERION_REGISTRY.get(getattr(args, "criterion", None)), "check_args"):
        criterion.check_args(args)


def _is_ours(kind: type | None, method: str) -> bool:
    """Return True if this package declares a method of a class. Other plugins may use its name for something else."""
    ours = (base for base in getattr(kind, "__mro__", ()) if base.__module__.startswith("fairseq_lowrank."))
    return any(method in vars(base) for base in ours)
