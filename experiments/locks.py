"""Locks between processes, and the row that only one process runs, and only once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import lock_descriptor

from fairseq_lowrank.files import say


@contextmanager
def locked(
    path: Path, flags: int = os.O_RDWR | os.O_CREAT, *, wait: bool = True, waiting: Callable[[], None] = lambda: None
) -> Iterator[int | None]:
    """Open a file or a folder and lock it while the block runs.

    A process that inherits the descriptor keeps the lock until it ends.

    Args:
        flags: the flags of `os.open`.
        wait: wait for another process that holds the lock.
        waiting: a function that is called once before waiting.

    Yields:
        The descriptor, or None if another process holds the lock and `wait` is false.
    """
    handle = os.open(path, flags, 0o666)
    try:
        free = lock_descriptor(handle, blocking=False)
        if wait and not free:
            waiting()
            free = lock_descriptor(handle)
        yield handle if free else None
    finally:
        os.close(handle)


def run_row(
    lock: Path,
    name: str,
    find_line: Callable[[], dict | None],
    run: Callable[[int], None],
    say: Callable[[str], None] = say,
) -> dict | None:
    """Run a row, unless another process is running it or has finished it.

    Args:
        lock: the file that is locked while the row runs; its folder is made.
        name: how a message calls the row.
        find_line: looks for the row's line of results. It is called after the row is locked.
        run: trains, scores and appends the line; takes the descriptor of the lock.

    Returns:
        The line if there was one already.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock, wait=False) as handle:
        if handle is None:
            say(f"{name}: another process is running this row; skipping it")
            return None
        if (line := find_line()) is None:
            run(handle)
        return line
