"""A disk that has no more room."""

import contextlib
import resource


@contextlib.contextmanager
def full_disk(size: int):
    """While open, no file of this process grows beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
