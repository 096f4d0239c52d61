"""Endings of fairseq's commands: one line and code 2 for a :class:`UserError`; a traceback and one line for the rest.

Only the console entry points (``cli_main`` of ``fairseq_cli``, ``main`` of a converter) end like this. Programs that call fairseq get its exceptions.
``LOWRANK_TRACEBACK=1`` shows the traceback of a :class:`UserError` too.
"""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from hydra.core.utils import JobReturn, JobStatus
from torch.multiprocessing import ProcessExitedException

from fairseq_lowrank.messages import UserError

USER_ERROR, UNEXPECTED, STOPPED = 2, 1, 143
"""Exit codes. STOPPED is that of a training that saved its state after SIGTERM."""
ENTRY_POINTS = {("fairseq_cli", "cli_main"), ("ctranslate2", "main")}
"""Packages of commands that import this one with a user directory, and the functions that their commands call."""


def end(error: BaseException) -> NoReturn:
    """Print an exception as a command does, and exit.

    Raises:
        SystemExit: always, with the code of the command.
    """
    if isinstance(error, ProcessExitedException) and error.exit_code in (USER_ERROR, STOPPED):
        raise SystemExit(error.exit_code)  # the worker has printed its line
    expected = isinstance(error, UserError)
    if not expected or os.environ.get("LOWRANK_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(error)
    message = str(error) if expected else summary(error)
    message = " ".join(message.split())
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr)
    report_to_launcher(message)
    raise SystemExit(USER_ERROR if expected else UNEXPECTED)


def summary(error: BaseException) -> str:
    """Return what an unexpected exception says: its whole message if that is short, such as omegaconf's, else its last line."""
    lines = traceback.format_exception_only(error)[-1].strip().splitlines()
    return "\n".join(lines if len(lines) <= 3 else lines[-1:])


def report_to_launcher(message: str) -> None:
    """Write the reason why a worker ends to the file that torchrun reads. Without torchrun, do nothing."""
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError), open(report, "w", encoding="utf-8") as file:  # its disk may be full
            json.dump({"message": message, "timestamp": int(time.time())}, file)


@contextlib.contextmanager
def as_command() -> Iterator[None]:
    """End an exception as the console entry point does."""
    try:
        yield
    except Exception as error:
        end(error)


# cli_main is running when --user-dir imports this package, so it is too late to replace it. Python calls this hook with an
# uncaught exception, and exits with the code of a SystemExit that the hook raises.
def end_commands(hook: Callable) -> Callable:
    """Wrap ``sys.excepthook``: call :func:`end` with an exception that a ``cli_main`` of ``fairseq_cli`` raises."""

    @functools.wraps(hook)
    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and leaves_command(trace):
            # torch calls this hook with a buffer as stderr, which it loses at SystemExit
            buffered = isinstance(sys.stderr, io.StringIO)
            with contextlib.redirect_stderr(sys.__stderr__) if buffered else contextlib.nullcontext():
                end(error)
        hook(kind, error, trace)

    return excepthook


def leaves_command(trace: TracebackType | None) -> bool:
    """Return True if a traceback passes through the console entry point of a command of fairseq or of a converter of its models."""
    for frame, _ in traceback.walk_tb(trace):
        spec = frame.f_globals.get("__spec__")  # __name__ is __main__ under python -m
        module = getattr(spec, "name", None) or frame.f_globals.get("__name__", "")
        if (module.partition(".")[0], frame.f_code.co_name) in ENTRY_POINTS:
            return True
    return False


@dataclass(frozen=True)
class Worker:
    """The main function of a command, also in a process that fairseq spawns.

    Unpickling it imports the plugin. A spawned process prints the line of a :class:`UserError` itself.
    """

    main: Callable

    def __call__(self, *args, **kwargs) -> object:
        try:
            return self.main(*args, **kwargs)
        except UserError as error:
            if multiprocessing.parent_process() is None:
                raise
            end(error)


def end_workers(call_main: Callable) -> Callable:
    """Let a worker that fairseq spawns end like a command."""

    @functools.wraps(call_main)
    def call_worker(cfg, main, **kwargs):
        return call_main(cfg, Worker(main), **kwargs)

    return call_worker


# hydra keeps the exception of fairseq-hydra-train until it reads the result, and then prints a shortened traceback.
def end_hydra_jobs(result: property) -> property:
    """Wrap ``JobReturn.return_value``: call :func:`end` with an exception of a job of fairseq-hydra-train."""

    def return_value(job: JobReturn) -> object:
        if job.status == JobStatus.FAILED and isinstance(job._return_value, Exception):
            end(job._return_value)
        return result.__get__(job)

    return property(return_value, result.fset)
