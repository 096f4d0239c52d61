"""The engine of recipes and controlled tasks: run the rows of a table that have no line of results yet, and append their lines."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from fairseq_lowrank.files import regular_file, say
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.records.locks import locked
from fairseq_lowrank.records.results import check_writable, read_results

Key = tuple[str, int, bool]


def refuse_dirty(*commits: str | None) -> None:
    """Refuse to make a line of results by code that is in no commit, unless the variable ``DIRTY`` is 1.

    Raises:
        UserError: a commit ends in "-dirty".
    """
    if any((commit or "").endswith("-dirty") for commit in commits) and os.environ.get("DIRTY") != "1":
        raise UserError(
            "files of this clone are changed or new, and not committed, so nobody could run this code again. Commit them, or set DIRTY=1."
        )


class Row(Protocol):
    """A row of a table with one seed. A row that is fine-tuned is named LABEL@TASK."""

    row: str
    seed: int
    smoke: bool


R = TypeVar("R", bound=Row)


def key(run: Row) -> Key:
    """Return what identifies the line of a run in its table."""
    return run.row, run.seed, run.smoke


def finished(path: Path, paper: str, table: str, complain: Callable[[str], None] = say) -> dict[Key, dict]:
    """Return the lines of a table by their keys, see :func:`key`. If two lines have one key, the last one counts."""
    lines = read_results(path, complain, measurements=True)
    return {
        (line["row"] + (f"@{line['task']}" if "task" in line else ""), line["seed"], line["smoke"]): line
        for line in lines
        if line["paper"] == paper and line["table"] == table
    }


class Engine(ABC, Generic[R]):
    """Runs the rows of a table one after another. Only one process runs a row, and it runs the row once.

    Args:
        paper: the paper that lines name.
        table: the table that lines name.
        results: the ``.jsonl`` file to which lines are appended.
        say: takes messages.

    Attributes:
        place: the number of the current row among those that had no line, such as "2 of 5".

    Raises:
        UserError: the results file is no regular file.
    """

    def __init__(self, paper: str, table: str, results: Path, say: Callable[[str], None] = say):
        self.paper, self.table, self.results, self.say = paper, table, results, say
        regular_file(results)
        self.place = ""

    @abstractmethod
    def runs(self) -> Iterable[R]:
        """Return the runs of the rows that are selected."""

    @abstractmethod
    def lock_file(self, run: R) -> Path:
        """Return the file that is locked while a row runs."""

    @abstractmethod
    def train(self, run: R, handle: int) -> None:
        """Train a row and append its line; `handle` is the descriptor of its lock."""

    def make_ready(self, run: R) -> bool:
        """Make what a row needs, before it is locked; return False if the row cannot run now."""
        return True

    def say_done(self, run: R, line: dict) -> None:
        """Say that a row has its line; by default nothing."""

    def finished(self, complain: Callable[[str], None] = say) -> dict[Key, dict]:
        """Return the lines that this table has, by their keys."""
        return finished(self.results, self.paper, self.table, complain)

    def left(self) -> list[R]:
        """Return the selected runs that have no line yet, and say which have one."""
        lines, left = self.finished(), []
        for run in self.runs():
            if line := lines.get(key(run)):
                self.say_done(run, line)
            else:
                left.append(run)
        return left

    def run_rows(self) -> None:
        """Run the selected rows that have no line yet."""
        left = self.left()
        for number, run in enumerate(left, start=1):
            self.place = f"{number} of {len(left)}"
            self.run_row(run)

    def run_row(self, run: R) -> None:
        """Run a row, unless another process is running it or has finished it since this one looked.

        Raises:
            UserError: the results file cannot be opened for appending.
        """
        check_writable(self.results)  # before a preparation that can take days
        if not self.make_ready(run):
            return
        lock = self.lock_file(run)
        lock.parent.mkdir(parents=True, exist_ok=True)
        with locked(lock, wait=False) as handle:
            if handle is None:
                self.say(f"{run}: another process is running this row; skipping it")
            elif line := self.finished(complain=lambda _: None).get(key(run)):
                self.say_done(run, line)
            else:
                self.train(run, handle)
