"""fairseq's commands end in one line and code 2, whatever was wrong; programs that call fairseq get its exceptions.

``LOWRANK_TRACEBACK=1`` in the environment shows the traceback before the line.
"""

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from fairseq.distributed import utils as distributed_utils
from hydra.core.utils import JobReturn, JobStatus

from fairseq_lowrank.messages import UserError, explanation, show_traceback
from fairseq_lowrank.plugin import inputs

# A command runs already while its parser imports us by --user-dir, so what it calls later is replaced too, by its name in
# the command's module: the first function that is given all arguments, with the check of what they name.
COMMANDS: dict[str, tuple[str, Callable[[argparse.Namespace], str | None]] | None] = {
    "fairseq_cli.train": ("convert_namespace_to_omegaconf", inputs.unusable_for_training),
    "fairseq_cli.generate": ("main", inputs.unusable_for_evaluation),
    "fairseq_cli.interactive": ("convert_namespace_to_omegaconf", inputs.unusable_for_evaluation),
    "fairseq_cli.eval_lm": ("convert_namespace_to_omegaconf", inputs.unusable_for_evaluation),
    "fairseq_cli.validate": ("convert_namespace_to_omegaconf", inputs.unusable_for_evaluation),
    "fairseq_cli.preprocess": ("main", inputs.unusable_for_preprocessing),
    "fairseq_cli.score": None,
    "fairseq_cli.hydra_train": None,
}


def end_commands_in_one_line() -> None:
    """Let those of fairseq's commands that are imported, and the one that runs, end in one line.

    It can be called again when more of them are imported; none is imported here, since each sets logging up its own way.
    """
    running = sys.modules["__main__"]
    running_name = getattr(getattr(running, "__spec__", None), "name", None)  # python -m fairseq_cli.train
    for name, first in COMMANDS.items():
        for module in (sys.modules.get(name), running if running_name == name else None):
            if module is not None:
                module.cli_main = in_one_line(module.cli_main)
                if first is not None:
                    called, check = first
                    setattr(module, called, in_one_line(getattr(module, called), check))
                if name == "fairseq_cli.generate":
                    module.open = written_whole
    distributed_utils.call_main = in_one_line(distributed_utils.call_main)
    JobReturn.return_value = property(result_of_job, HYDRAS_RESULT.fset)


HYDRAS_RESULT = JobReturn.return_value


# Hydra keeps what fairseq-hydra-train raises, and prints a traceback when it asks for the result.
def result_of_job(job: JobReturn) -> object:
    """What a job of hydra's returned; what it raised ends in one line."""
    with one_line():
        if job.status == JobStatus.FAILED:
            raise job._return_value
    return HYDRAS_RESULT.fget(job)


# fairseq-generate --results-path empties the file of an earlier call before it has loaded a model.
@contextlib.contextmanager
def written_whole(path: str, *args, **kwargs) -> Iterator[IO[str]]:
    """``open`` of a file that takes its name when it is whole; until then, and after an interrupt, it is ``path``.tmp."""
    unfinished = f"{path}.tmp"
    try:
        with open(unfinished, *args, **kwargs) as file:
            yield file
        os.replace(unfinished, path)
    except Exception:
        Path(unfinished).unlink(missing_ok=True)
        raise


def in_one_line(function: Callable, check: Callable | None = None) -> Callable:
    """``function``, ended by :func:`one_line`, also where ``check`` gives a reason to refuse its argument."""
    if getattr(function, "ends_in_one_line", False):
        return function

    @functools.wraps(function)
    def ending(*args, **kwargs):
        with one_line():
            if check is not None and isinstance(args[0], argparse.Namespace) and (reason := check(args[0])):
                raise UserError(reason)
            return function(*args, **kwargs)

    ending.ends_in_one_line = True
    return ending


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Turn an exception into a line on stderr and exit code 2."""
    try:
        yield
    except Exception as error:
        show_traceback()
        print(f"{os.path.basename(sys.argv[0])}: error: {explanation(error)}", file=sys.stderr)
        raise SystemExit(2) from error
