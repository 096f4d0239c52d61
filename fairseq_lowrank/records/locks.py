"""Locks between processes, and files to which several processes append."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


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
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = wait
            if wait:
                waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle if free else None
    finally:
        os.close(handle)


def append_whole(handle: int, data: bytes) -> None:
    """Append bytes to a file that is opened for appending and locked, completely or not at all."""
    size = os.fstat(handle).st_size
    try:
        if os.write(handle, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(handle)
    except BaseException:
        os.ftruncate(handle, size)
        raise
