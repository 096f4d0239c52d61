"""Locks between processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import lock_descriptor


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
