"""Small tools for text files: read plain or gzip, write a whole file or nothing."""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import Pool
from pathlib import Path

from fairseq_lowrank.messages import UserError


def say(message: str) -> None:
    """Print one line of progress to standard error."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def whole_file(path: Path, mode: str = "w") -> Iterator:
    """Open `path` + ".part" for writing and rename it to `path` only when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Make the folder `path` + ".part" and rename it to `path` only when the block ends without an error."""
    part = path.with_name(path.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        os.replace(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def unpacked(path: Path, mode: str = "rb", **options) -> Iterator:
    """Open a file for reading, as gzip if its name ends in .gz.

    Raises:
        UserError: the gzip file is damaged or truncated.
    """
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, mode, **options) as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged, cut short, or not a gzip file: {error}. Download it again.") from error


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, gzip or plain. Only a newline ends a line, not other separators such as U+2028.

    Raises:
        UserError: the file is a damaged or truncated gzip file, or is not UTF-8.
    """
    try:
        with unpacked(path, "rt", encoding="utf-8", newline="\n") as file:
            for line in file:
                yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error


def write_lines(path: Path, lines: Iterable[str]) -> None:
    with whole_file(path) as file:
        file.writelines(f"{line}\n" for line in lines)


def map_lines(function: Callable[[str], str], source: Path, target: Path, workers: int = 1) -> None:
    """Write `function(line)` for each line of `source`, with several processes if `workers` > 1."""
    if workers == 1:
        write_lines(target, map(function, read_lines(source)))
    else:
        with Pool(workers) as pool:
            write_lines(target, pool.imap(function, read_lines(source), chunksize=2000))
