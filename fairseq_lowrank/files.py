"""Small tools for files: read plain or gzip text, write a whole file or nothing."""

from __future__ import annotations

import errno
import functools
import gzip
import io
import json
import os
import re
import secrets
import shutil
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fairseq_lowrank.messages import FULL_DISK, UserError, escape_control


def say(message: str) -> None:
    """Print one line of progress to standard error, in one write: print makes two, and lines of threads would mix."""
    sys.stderr.write(f"{escape_control(message)}\n")
    sys.stderr.flush()


@contextmanager
def named_if_full(path: Path) -> Iterator[None]:
    """Raise UserError with the path if the block cannot write, because the disk or the quota is full.

    The error of a write has no file name, and torch raises a RuntimeError over it. Of two blocks, the outer one has the path that
    the user gave.
    """
    try:
        yield
    except (OSError, RuntimeError, UserError) as error:
        cause: BaseException | None = error
        while cause is not None and not (isinstance(cause, OSError) and cause.errno in FULL_DISK):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        reason = os.strerror(cause.errno or errno.ENOSPC)
        raise UserError(f"{path}: {reason}; nothing was written. Free some space, or choose another place.") from error


def regular_file(path: Path) -> Path:
    """Return the file that a path leads to, past symbolic links. It need not exist.

    Raises:
        UserError: it exists and is no regular file, such as a folder, a pipe or /dev/null.
    """
    real = Path(os.path.realpath(path))
    try:
        mode = os.lstat(real).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return real
    if stat.S_ISREG(mode):
        return real
    kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
    raise UserError(f"{path}: is {kind}. Give the name of a file.")


@functools.cache  # said once
def first_folder(text: str) -> Path:
    """Return the first of several data folders, which fairseq separates by colons, and say so."""
    first, *others = text.split(os.pathsep)
    if others:
        say(f"{text} is several data folders: using the first, {first}")
    return Path(first)


def make_parent(path: Path) -> None:
    """Make the folder of a path.

    Raises:
        UserError: a file has its name.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(
            f"{error.filename}: is a file, so it cannot be the folder of {path.name}. Give another folder."
        ) from error


@contextmanager
def whole_file(path: Path, mode: str = "w") -> Iterator:
    """Open a file with ".part" at the end of its name, and rename it to `path` only when the block ends without an error.

    Each call has its own file. If two write at the same time, the later one is kept, whole.
    A symbolic link stays, and the file that it leads to is written.

    Raises:
        UserError: the disk is full, or the path leads to something else than a file.
    """
    with whole_files(path, mode=mode) as (file,):
        yield file


@contextmanager
def whole_files(*paths: Path, mode: str = "w") -> Iterator[list]:
    """Open several files like :func:`whole_file`, and rename them one after the other when all of them are complete."""
    for path in paths:
        make_parent(path)
    real = [regular_file(path) for path in paths]
    parts = [_part(path) for path in real]
    try:
        with named_if_full(paths[0]):
            with ExitStack() as files:
                yield [
                    files.enter_context(open(part, mode, encoding=None if "b" in mode else "utf-8")) for part in parts
                ]
            for part, path in zip(parts, real, strict=True):
                os.replace(part, path)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)


def _part(path: Path) -> Path:
    """Return the name of a file or folder that is not complete, which no other process has."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Make a folder with ".part" at the end of its name, and rename it to `path` only when the block ends without an error.

    Raises:
        UserError: the disk is full, a file has the name of the folder above, or `path` has files at the end of the block.
    """
    make_parent(path)
    part = _part(path)
    part.mkdir()
    try:
        with named_if_full(path):
            yield part
            try:
                os.replace(part, path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                raise UserError(
                    f"{path}: another process has made it meanwhile, so nothing was written. Use it, or remove it and run "
                    "this again."
                ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def unpacked(path: Path, mode: str = "rb", **options: Any) -> Iterator:
    """Open a file for reading, as gzip if its name ends in .gz.

    Raises:
        UserError: the gzip file is damaged or truncated.
    """
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, mode, **options) as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged, cut short, or not a gzip file: {error}. Download it again.") from error


def read_json(path: Path) -> dict:
    """Return the object in a JSON file.

    Raises:
        UserError: the file is not JSON, or has no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}. Make or download it again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} has no JSON object. Make or download it again.")
    return content


# Python or fairseq end a line at each of these characters, so a sentence with one of them would become two.
LINE_BREAK = re.compile("[\\n\\r\\x0b\\x0c\\x1c-\\x1e\\x85\\u2028\\u2029]")


def read_lines(path: Path, *, errors: str = "strict") -> Iterator[str]:
    """Yield the lines of a UTF-8 file, gzip or plain, without a byte order mark.

    Only a newline ends a line, not other separators such as U+2028.

    Args:
        errors: "replace" reads a log whose lines may be cut, or have paths in another encoding.

    Raises:
        UserError: the file is a damaged or truncated gzip file, or is not UTF-8.
    """
    try:
        with unpacked(path, "rt", encoding="utf-8-sig", errors=errors, newline="\n") as file:
            for line in file:
                yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}. Convert it: iconv -f LATIN1 -t UTF-8 FILE.") from error


def read_input() -> Iterator[str]:
    """Yield the lines of standard input, like :func:`read_lines`.

    Raises:
        UserError: the input is not UTF-8.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict", newline="\n")
    try:
        for line in sys.stdin:
            yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 text: {error}. Convert it: iconv -f LATIN1 -t UTF-8.") from error


def replace_line_breaks(lines: Iterable[str], path: Path) -> Iterator[str]:
    """Yield lines with a blank for each :data:`LINE_BREAK` within them, and say at the end how many there were.

    Args:
        path: the file to name in the message.
    """
    total = 0
    try:
        for line in lines:
            line, count = LINE_BREAK.subn(" ", line)
            total += count
            yield line
    finally:
        if total:
            say(f"{path}: {total:,} line breaks within sentences are replaced by blanks")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines as a whole file; line breaks within them become blanks."""
    with whole_file(path) as file:
        file.writelines(f"{line}\n" for line in replace_line_breaks(lines, path))
