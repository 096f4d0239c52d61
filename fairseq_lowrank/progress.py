"""Tell how far a long step is: a bar in a terminal, and a line each ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from threading import Event, Thread
from typing import Any, ClassVar, TypeVar

from fairseq_lowrank.messages import escape_control

INTERVAL = 10.0
"""Seconds between two lines."""

T = TypeVar("T")


class Progress:
    """A count of what a step has done. While its block runs, it is shown; a step of less than ten seconds prints no line.

    Of steps within steps only the innermost prints lines. Without a total a line has no estimate, and a terminal gets lines too.

    Args:
        label: the name of the step.
        total: the number of units, if it is known.
        unit: the name of what is counted, in the plural.
        rough: True if the total is an estimate.
    """

    running: ClassVar[list[Progress]] = []

    def __init__(self, label: str, total: int | None = None, unit: str = "", *, rough: bool = False) -> None:
        self.label, self.total, self.unit, self.rough = label, total, unit, rough
        self.done, self.start = 0, time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> Progress:
        self.running.append(self)
        if self.total is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(desc=self.label, total=self.total, unit=f" {self.unit}", leave=False)
        else:
            self.ended = Event()
            self.thread = Thread(target=self._tell, daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.running.remove(self)
        if self.bar is not None:
            self.bar.close()
        else:
            self.ended.set()
            self.thread.join()

    def update(self, count: int = 1) -> None:
        """Add to the count."""
        self.done += count
        if self.bar is not None:
            self.bar.update(count)

    def hide(self) -> None:
        """Remove the bar until the next update, so that the output of a command can be printed."""
        if self.bar is not None:
            self.bar.clear()

    def text(self) -> str:
        """Return a line: what is done, the seconds so far and, if the total is known, an estimate of those left."""
        elapsed = time.monotonic() - self.start
        if self.total is None:
            done = f"{self.done:,} {self.unit} in " if self.done else ""
            return f"{self.label}: {done}{elapsed:.0f} s" + ("" if done else " so far")
        text = f"{self.label}: {self.done:,} of {'about ' if self.rough else ''}{self.total:,} {self.unit} in {elapsed:.0f} s"
        if not 0 < self.done <= self.total:  # nothing is known yet, or a rough total was too small
            return text
        return f"{text}, about {(self.total - self.done) * elapsed / self.done:.0f} s left"

    def _tell(self) -> None:
        while not self.ended.wait(INTERVAL):
            if self.running[-1:] == [self]:
                self._say(escape_control(self.text()))

    def _say(self, line: str) -> None:
        if sys.stderr.isatty():  # there may be bars
            from tqdm import tqdm

            tqdm.write(line, file=sys.stderr)
        else:
            sys.stderr.write(f"{line}\n")  # in one write: print makes two, and lines of threads would mix
            sys.stderr.flush()


def tracked(items: Iterable[T], label: str, unit: str, total: int | None = None) -> Iterator[T]:
    """Yield the items, and show how many are done.

    Args:
        total: their number, for items without a length.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Progress(label, total, unit) as progress:
        for item in items:
            yield item
            progress.update()
