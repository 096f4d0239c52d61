"""The command ``fairseq-lowrank``: one module of this package for each subcommand.

A command module has ``NAME``, ``HELP`` (one line), a docstring shown by ``--help``, ``add_arguments(parser)``
and ``run(args)``, which returns an exit status or None. It imports torch and fairseq inside ``run``.
With ``TAKES_FLAGS = True``, flags that the command does not declare, such as fairseq's, are in ``args.flags``.
With ``SHOWS_TIME = False``, no line each ten seconds says how long the command has run. The command line is in ``args.words``.
"""

import argparse
import contextlib
import importlib
import logging
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from fairseq_lowrank import __version__, importing, messages
from fairseq_lowrank.cli import _output
from fairseq_lowrank.progress import Progress


class Group(NamedTuple):
    """A group of subcommands in ``--help``: its title, an example, and the names of its commands."""

    title: str
    example: str
    commands: tuple[str, ...]


GROUPS = (
    Group("Start here: measure", "measure checkpoint_best.pt --quick", ("measure",)),
    Group("Understand a model", "inspect checkpoint_best.pt", ("inspect", "params")),
    Group(
        "Train",
        "launch --workers 2 -- fairseq-train DATA --arch ARCH …",
        ("launch", "hydra-train", "user-dir"),
    ),
    Group(
        "Use a model",
        "translate checkpoint_best.pt text.de --data DATA",
        ("translate", "average", "convert", "export"),
    ),
    Group("Keep and compare results", "compare results.jsonl --pair mha mixhead-a", ("record", "compare")),
    Group("Check the installation", "env", ("env",)),
)
"""Every subcommand, in the order of ``--help``."""

IN_A_CLONE = "'python -m experiments {}' in a clone of the repository"
MOVED = {
    "advise": "'fairseq-lowrank params' and 'fairseq-lowrank measure'",
    "architectures": "'fairseq-lowrank params --list fairseq'",
    "check-kernels": "'fairseq-lowrank env --kernels'",
    "import-bert": IN_A_CLONE.format("bert import"),
    "predict": IN_A_CLONE.format("bert predict"),
    "spectrum": "'fairseq-lowrank inspect --spectrum'",
    "wordpieces": IN_A_CLONE.format("bert wordpieces"),
    "report": IN_A_CLONE.format("report"),
}
"""The commands of earlier versions, and what does their work now."""


class CommandParser(argparse.ArgumentParser):
    """The parser of a subcommand: flags may stand between its other words, as in ``translate CKPT --data DIR FILE``."""

    takes_flags = False
    """True if other words are left over. A value of an unknown flag must not become the value of a declared argument."""

    def parse_known_args(self, args=None, namespace=None):
        parse = super().parse_known_args
        if self.takes_flags:
            return parse(args, namespace)
        vars(self)["parse_known_args"] = parse  # the next function calls it twice
        try:
            return self.parse_known_intermixed_args(args, namespace)
        except TypeError:  # an argument takes all words that are left
            return parse(args, namespace)
        finally:
            del vars(self)["parse_known_args"]


def command_modules(package: ModuleType) -> dict[str, ModuleType]:
    """Return the module of each subcommand in ``package``, by its name on the command line."""
    names = [info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_")]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return {module.NAME: module for module in sorted(modules, key=lambda module: module.NAME)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand of ``fairseq-lowrank`` and return its exit status."""
    description = "Tools for attention and its low-rank bottleneck in fairseq."
    package = sys.modules[__name__]
    return run_subcommand("fairseq-lowrank", description, package, argv, GROUPS, MOVED, takes_user_dir=True)


def run_subcommand(
    program: str,
    description: str,
    package: ModuleType,
    argv: Sequence[str] | None = None,
    groups: Sequence[Group] = (),
    moved: Mapping[str, str] = MappingProxyType({}),
    *,
    takes_user_dir: bool = False,
) -> int:
    """Run one subcommand and return its exit status; :func:`~fairseq_lowrank.messages.report` handles exceptions.

    Args:
        program: the name of the program in usage and error lines.
        package: the package with a module for each subcommand.
        groups: the groups of subcommands in ``--help``; by default they are one list.
        moved: subcommands of earlier versions, and what does their work now.
        takes_user_dir: offer ``--user-dir``, for models of another plugin of fairseq.
    """
    _output.print_safely()
    modules = command_modules(package)
    usage = f"{program} [-h] [--version] {'[--user-dir DIR] ' if takes_user_dir else ''}COMMAND …"
    parser = argparse.ArgumentParser(
        prog=program,
        usage=usage,
        description=description,
        epilog=_list_commands(program, modules, groups),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = _add_commands(parser, modules, takes_user_dir)
    _check_command(parser, modules, argv, moved)
    words = list(sys.argv[1:] if argv is None else argv)
    args, flags = parser.parse_known_args(words)
    args.words = words
    if commands[args.command].takes_flags:
        args.flags = flags
    elif flags:
        declared = commands[args.command]._option_string_actions
        parser.error(f"unrecognized arguments: {' '.join(flags)}.{messages.did_you_mean(flags[0], declared)}")
    return _run(program, modules[args.command], args)


def _add_commands(
    parser: argparse.ArgumentParser, modules: dict[str, ModuleType], takes_user_dir: bool
) -> dict[str, CommandParser]:
    """Add a parser for each subcommand, and ``--user-dir`` to all of them; return these parsers by their names."""
    user_dir: dict[str, Any] = {
        "type": Path,
        "metavar": "DIR",
        "help": "your own plugin of fairseq, with its models and methods",
    }
    if takes_user_dir:
        parser.add_argument("--user-dir", **user_dir)
    subparsers = parser.add_subparsers(
        dest="command",
        metavar="COMMAND",
        required=True,
        parser_class=CommandParser,
        prog=parser.prog,
        help=argparse.SUPPRESS,
    )
    formatter = argparse.RawDescriptionHelpFormatter
    for name, module in modules.items():
        command = subparsers.add_parser(name, description=module.__doc__, formatter_class=formatter)
        command.takes_flags = getattr(module, "TAKES_FLAGS", False)
        module.add_arguments(command)
        if takes_user_dir:
            command.add_argument("--user-dir", **user_dir, default=argparse.SUPPRESS)
    return subparsers.choices


def _run(program: str, module: ModuleType, args: argparse.Namespace) -> int:
    """Run a subcommand with its arguments, and return its exit status."""
    # fairseq's wav2vec sets the level DEBUG for every library when it is imported. The first call of basicConfig wins.
    level = logging.root.level
    logging.basicConfig(level=logging.WARNING)
    logging.root.setLevel(logging.WARNING)
    try:
        _output.check(args)
        _output.check_checkpoints(args)
        if sys.version_info >= (3, 14):
            importing.import_fairseq()
        if getattr(args, "user_dir", None) is not None:
            import_plugin(args.user_dir)
        with Progress(args.command) if getattr(module, "SHOWS_TIME", True) else contextlib.nullcontext():
            code = module.run(args) or 0
        sys.stdout.flush()  # here, where a reader that stopped is no fault
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output may stop early
        _output.discard_output()
        return 0
    except Exception as error:
        # the output may be a file on a full disk, which cannot be flushed
        if isinstance(error, OSError) and error.errno in messages.FULL_DISK:
            _output.discard_output()
        return messages.report(error, f"{program} {args.command}")
    finally:
        logging.root.setLevel(level)


def _list_commands(program: str, modules: dict[str, ModuleType], groups: Sequence[Group]) -> str:
    """Return the text of ``--help`` on the subcommands."""
    width, lines = max(map(len, modules)), []
    for title, example, names in groups or [Group("Commands", "", tuple(modules))]:
        lines += [title, *([f"    {program} {example}"] if example else [])]
        lines += [f"  {name:<{width}}  {modules[name].HELP}" for name in names] + [""]
    return "\n".join([*lines, f"'{program} COMMAND --help' explains a command and its flags."])


def _check_command(
    parser: argparse.ArgumentParser,
    modules: dict[str, ModuleType],
    argv: Sequence[str] | None,
    moved: Mapping[str, str],
) -> None:
    """Refuse a subcommand that does not exist: with what replaces one of earlier versions, or with the closest name."""
    first = argparse.ArgumentParser(prog=parser.prog, usage=parser.usage, add_help=False)
    first.add_argument("--user-dir")
    first.add_argument("command", nargs="?")
    name = first.parse_known_args(argv)[0].command
    if name in modules or name is None:
        return
    if name in moved:
        parser.error(f"{name} is no longer a command. Use {moved[name]}.")
    parser.error(
        f"invalid choice: {name!r}: expected one of {', '.join(modules)}.{messages.did_you_mean(name, modules)}"
    )


def import_plugin(folder: Path) -> None:
    """Import a plugin of fairseq, so that its models can be loaded.

    Raises:
        UserError: there is no such folder.
    """
    from fairseq import utils

    utils.import_user_module(argparse.Namespace(user_dir=str(folder)))
