"""Commands that run at the same time, each line of their progress with its name in front."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from fairseq_lowrank.files import say


class Job(NamedTuple):
    """A command, and the variables of the environment that it gets."""

    words: Sequence[str]
    environment: Mapping[str, str]


def run_jobs(jobs: Mapping[str, Job], at_once: int, text: str) -> int:
    """Run jobs, a few at a time, each with `text` as its standard input. After a failure none is started.

    Standard error is shown line by line after the name of the job. If this process is interrupted, all jobs are ended.

    Returns:
        The exit status of the first job that failed, or 0.
    """
    waiting, running, code = list(jobs), dict[str, _Process](), 0
    try:
        while running or (waiting and not code):
            while waiting and not code and len(running) < at_once:
                name = waiting.pop(0)
                running[name] = _Process(name, jobs[name], text)
            for name in [name for name, job in running.items() if job.process.poll() is not None]:
                status = running.pop(name).end()
                code = code or status
            time.sleep(0.1)
    finally:
        for job in running.values():
            job.process.terminate()
        for job in running.values():
            job.end()
    return code


class _Process:
    def __init__(self, name: str, job: Job, text: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            job.words,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(job.environment),
            text=True,
            errors="replace",
        )
        self.shown = threading.Thread(target=self._show)
        self.shown.start()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin:  # it may end before it reads
            self.process.stdin.write(text)

    def _show(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            say(f"{self.name} | {line.rstrip()}")

    def end(self) -> int:
        """Wait for the process and its last line, and return its status."""
        status = self.process.wait()
        self.shown.join()
        return status
