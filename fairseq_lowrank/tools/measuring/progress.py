"""Tell how far a measurement is: a bar in a terminal, and a line each ten seconds elsewhere."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

INTERVAL = 10.0
"""Seconds between two lines."""


class Progress:
    """A count of passes through a model. It starts with a line that says how many there will be.

    Args:
        label: the model's name.
        passes: the expected number of passes.
    """

    def __init__(self, label: str, passes: int) -> None:
        self.label, self.passes, self.done = label, passes, 0
        self.start = self.last = time.monotonic()
        self._say(f"about {passes:,} passes of one sequence each")
        self.bar = tqdm(desc=label, total=passes, unit=" passes", disable=None, leave=False)

    def update(self) -> None:
        """Count one pass."""
        self.done += 1
        self.bar.update()
        now = time.monotonic()
        if self.bar.disable and now - self.last >= INTERVAL:
            self.last, elapsed = now, now - self.start
            left = max(0, self.passes - self.done) * elapsed / self.done
            self._say(f"{self.done:,} of about {self.passes:,} passes in {elapsed:.0f} s, about {left:.0f} s left")

    def close(self) -> None:
        """Remove the bar."""
        self.bar.close()

    def _say(self, text: str) -> None:
        print(f"{self.label}: {text}", file=sys.stderr, flush=True)
