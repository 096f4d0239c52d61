"""Output of commands: a table or JSON on the screen, and files that are written completely or not at all."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_lowrank import files
from fairseq_lowrank.messages import FlagError, UserError, escape_control, flag_name

GIVE_A_FOLDER = "Give a folder; it is created if it does not exist."


def add_output_arguments(parser, files: str) -> None:
    """Add `--json` and `--output DIR`; `files` names the files for the help."""
    add_json_argument(parser)
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"folder to write to: {files}")
    parser.set_defaults(check_output=check_folder)


def add_json_argument(parser) -> None:
    """Add `--json`, which :func:`show` reads."""
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON instead of a table")


def add_transformers_argument(parser) -> None:
    """Add `--transformers FOLDER`. :func:`refuse_with_transformers` keeps it apart from flags for models of fairseq."""
    parser.add_argument(
        "--transformers",
        type=Path,
        metavar="FOLDER",
        help="a model of transformers: a folder that from_pretrained reads (nothing is downloaded)",
    )


def add_model_arguments(parser) -> None:
    """Add the three ways to give a model to a command with ``TAKES_FLAGS``; :func:`take_checkpoint` completes them."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--checkpoint", type=Path, metavar="CKPT", help="a checkpoint of fairseq-train; the flag may be left out"
    )
    model.add_argument("--arch", metavar="A", help="or an architecture, with any flags of fairseq-train")
    add_transformers_argument(model)


def take_checkpoint(args) -> None:
    """Take the first word that belongs to no flag as the checkpoint.

    Raises:
        UserError: a second model is given, or none, flags of fairseq with a checkpoint, or a checkpoint that does not exist.
    """
    if args.flags and not args.flags[0].startswith("-"):
        word = args.flags.pop(0)
        if others := [name for name in ("checkpoint", "arch", "transformers") if getattr(args, name) is not None]:
            raise UserError(f"{word}: {flag_name(others[0])} gives a model too. Remove one of the two.")
        args.checkpoint = Path(word)
    if args.checkpoint is not None and args.flags:
        given = " ".join(args.flags)
        raise UserError(f"{given}: does not work with a checkpoint, which has its own flags. Remove it.")
    if args.checkpoint is args.arch is args.transformers is None:
        raise UserError("no model given. Add a checkpoint, --arch ARCH --vocab-size N, or --transformers FOLDER.")
    check_checkpoints(args)


def check_checkpoints(args) -> None:
    """Check that every checkpoint exists, before anything is loaded.

    Raises:
        UserError: one does not exist.
    """
    if getattr(args, "transformers", None) is not None:
        return
    single = [getattr(args, name, None) for name in ("checkpoint", "compare")]
    for path in filter(None, [*single, *getattr(args, "checkpoints", ())]):
        if not Path(path).is_file():
            raise UserError(f"{path} is not a checkpoint file. Give the path of one, such as checkpoint_best.pt.")


def refuse_with_transformers(args, defaults: dict[str, object], flags: Sequence[str] = ()) -> None:
    """Refuse what only a model of fairseq can have, before anything is loaded.

    Args:
        defaults: the names of the arguments that have no meaning for a model of transformers, with their defaults.
        flags: flags of fairseq that were given.

    Raises:
        UserError: one of them was given.
    """
    given: list[str] = []
    for name, default in defaults.items():
        if (value := getattr(args, name)) != default:
            paths = {"checkpoint": [value], "checkpoints": value}.get(name)  # these have no flag
            given += [flag_name(name)] if paths is None else map(str, paths)
    if given := [*given, *flags]:
        raise UserError(f"{' '.join(given)} works only with models of fairseq. Remove it, or remove --transformers.")


def add_checkpoint_argument(parser, text: str) -> None:
    """Add `--output FILE` to a command that writes a checkpoint."""
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=text)
    add_force_argument(parser)
    parser.set_defaults(check_output=check_file)


def add_force_argument(parser) -> None:
    """Add `--force` to a command whose output takes long to make again."""
    parser.add_argument("--force", action="store_true", help="replace files that exist")


def check(args) -> None:
    """Check that `--output` can be written, and that it replaces no input, before anything is computed.

    Raises:
        FlagError: see the messages.
    """
    if getattr(args, "output", None) is None or not hasattr(args, "check_output"):
        return
    args.check_output(args.output)
    made = [args.output / name for name in args.writes] if hasattr(args, "writes") else [args.output]
    for path in made if hasattr(args, "force") else ():
        refuse_to_replace(args, path)


def refuse_to_replace(args, path: Path) -> None:
    """Refuse to write over an input. A command with `--force` needs it to write over any file.

    Raises:
        FlagError: see the messages.
    """
    remedy = "Choose another place."
    try:
        real = files.regular_file(path)
    except UserError as error:
        raise FlagError("--output", args.output, f"{path} is no regular file", remedy) from error
    if not real.exists():
        return
    if any(real.samefile(one) for one in inputs(args)):
        raise FlagError("--output", args.output, f"{path} is an input of this command", remedy)
    if not getattr(args, "force", True):
        raise FlagError("--output", args.output, f"{path} exists", "Choose another place, or add --force.")


def inputs(args) -> list[Path]:
    """Return the files that the other arguments name."""
    given = [value for name, value in vars(args).items() if name not in ("output", "words")]
    names = [one for value in given for one in (value if isinstance(value, (list, tuple)) else [value])]
    return [Path(one) for one in names if isinstance(one, (str, Path)) and os.path.isfile(one)]


def check_folder(path: Path) -> None:
    """Check that a path is a directory or can become one."""
    nearest = next(folder for folder in (path, *path.parents) if folder.exists() or folder.is_symlink())
    if not nearest.is_dir():
        raise FlagError("--output", path, f"{nearest} is not a folder", GIVE_A_FOLDER)
    _check_writable(path, nearest)


def check_file(path: Path) -> None:
    """Check that a file can be written at a path."""
    if path.is_dir():
        raise FlagError("--output", path, "is a folder", "Give the name of a file.")
    if not path.parent.is_dir():
        raise FlagError("--output", path, f"the folder {path.parent} does not exist", "Create it first.")
    _check_writable(path, path.parent)


def _check_writable(path: Path, folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FlagError("--output", path, f"you may not write into {folder}", "Choose another place.")


def print_safely() -> None:
    """Make standard output escape characters that its encoding does not have."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def show(args, data, text: str) -> None:
    """Print the data as JSON with `--json`, else the text."""
    if args.json:
        plain = (sys.stdout.encoding or "utf-8").lower() != "utf-8"
        text = json.dumps(data, indent=2, ensure_ascii=plain)
    say(text)


def say(text: str) -> None:
    """Print a text, with its control characters escaped. The reader of the output may stop early, as ``head`` does."""
    _print(escape_control(text))


def say_data(text: str) -> None:
    """Print a text that is data for another program. Only a terminal gets its control characters escaped."""
    _print(escape_control(text) if sys.stdout.isatty() else text)


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard_output()


def discard_output() -> None:
    """Discard further output, because its reader has stopped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class View(NamedTuple):
    """What a command shows of its models.

    Args:
        name: the name of the files, and of the command.
        data: for JSON.
        rows: for CSV.
        text: for the screen.
        draw: returns the figures by their names; called only if they are written.
    """

    name: str
    data: Any
    rows: list[dict]
    text: str
    draw: Callable[[], dict] = dict


def publish(args, view: View) -> None:
    """Write a view to `--output`, if given, and print it, so that an error of the screen loses no file."""
    write(args, view.name, view.data, view.rows, view.draw() if args.output else {})
    show(args, view.data, view.text)


def write(args, name: str, data, rows: list[dict], figures: dict, pages: dict[str, str] | None = None) -> None:
    """Write NAME.json, NAME.csv, the pages and every figure as PNG and PDF to `--output`, if given, and print their names.

    If drawing fails, no file is written. A command writes before it prints.
    """
    if args.output is None:
        return
    pages = {f"{name}.json": json.dumps(data, indent=2, ensure_ascii=False) + "\n"} | (pages or {})

    def fill(folder: Path) -> None:
        for file, text in pages.items():
            (folder / file).write_text(text, encoding="utf-8")
        with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as table:
            writer = csv.DictWriter(table, fieldnames=list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)
        for figure_name, figure in figures.items():
            from fairseq_lowrank.tools import pictures

            pictures.save(figure, folder, figure_name)

    write_together(args, fill)


def write_together(args, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a temporary directory, move them to the folder `--output`, and print their names.

    Raises:
        UserError: the disk is full, or a file would replace an input. Then no file is moved.
    """
    folder: Path = args.output
    existed = folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as unfinished:
            with files.named_if_full(folder):
                fill(Path(unfinished))
            made = {file: folder / file.name for file in sorted(Path(unfinished).iterdir())}
            for path in made.values():
                refuse_to_replace(args, path)
                if path.is_symlink():
                    raise FlagError("--output", folder, f"{path} is a symbolic link", "Choose another place.")
            replaced = [path for path in made.values() if path.exists()]
            for file, path in made.items():
                file.replace(path)
    finally:
        if not existed and not any(folder.iterdir()):
            folder.rmdir()
    if written := [path for path in made.values() if path not in replaced]:
        files.say(f"wrote {' '.join(map(str, written))}")
    if replaced:
        files.say(f"replaced {' '.join(map(str, replaced))}")


def save_checkpoint(state: dict, path: Path) -> None:
    """Write a checkpoint completely, or leave the old file.

    Raises:
        UserError: the disk is full.
    """
    import torch

    existed = path.exists()
    with files.whole_file(path, "wb") as file:
        torch.save(state, file)
    if existed:
        files.say(f"replaced {path}")


def table(header: list[str], rows: list[list]) -> str:
    """Return a table with the first column aligned to the left and the others to the right."""
    # an end of a line within a cell would break the table
    cells = [header, *([str(cell).replace("\n", "\\n") for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)


def axes_table(columns: dict[str, dict]) -> str:
    """Return a table of attention's axes, with a row for each axis that has a value, except options that no part reads.

    Args:
        columns: the axes of each site, or group of layers, by its name.
    """
    from fairseq_lowrank.parts import AXES

    def is_read(name: str, axes: dict) -> bool:
        readers = AXES[name].readers if name in AXES else ()
        return not readers or any(axes.get(axis, part) == part for axis, part in readers)

    columns = {
        place: {name: value for name, value in axes.items() if value and is_read(name, axes)}
        for place, axes in columns.items()
    }
    names = dict.fromkeys(name for axes in columns.values() for name in axes)
    return table(["", *columns], [[name, *(axes.get(name) or "" for axes in columns.values())] for name in names])
