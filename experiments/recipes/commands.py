"""Calls of fairseq's commands: each is printed, its output goes to a log, and its epochs are shown while it runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fairseq_lowrank.files import say
from fairseq_lowrank.progress import INTERVAL, Progress
from fairseq_lowrank.records.logs import progress


class CommandFailed(Exception):
    """A command ended with `code`; its output is in the log, and the last lines are in the message."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


class Commands:
    """A function that runs a command, `commands(words, log)`; with `dry_run` it only prints the command.

    Args:
        dry_run: if True, run nothing.
        threads: the number of threads of each command.
    """

    def __init__(self, *, dry_run: bool = False, threads: int = 1):
        self.dry_run = dry_run
        # PYTHONUNBUFFERED: so that no line of the log, on standard error, cuts a hypothesis, on standard output
        # PYTHONIOENCODING: so that hypotheses can be written, and read again, in every locale
        own = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
        self.environment = os.environ | own

    def __call__(self, words: Sequence[str], log: Path, keep: int | None = None, patches: str = "") -> None:
        """Run a command to its end with further optional patches of fairseq, and append its output to `log`.

        The command writes to the log directly and inherits the open file `keep`. So if this process is killed, the command
        continues, and a lock on that file stays.

        Raises:
            CommandFailed: the exit status is not 0.
        """
        self.show(words)
        if self.dry_run:
            return
        with open(log, "ab") as output, open(log, "rb") as said:
            output.write(f"+ {shlex.join(words)}\n".encode())
            output.flush()
            said.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                program(words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.with_patches(patches),
                pass_fds=() if keep is None else (keep,),
            )
            try:
                code = follow(process, said, words[0])
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if code:
            end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
            raise CommandFailed(f"failed; the end of {log}:\n{end}", code)

    def with_patches(self, patches: str) -> dict[str, str]:
        """Return the environment of a command in which these optional patches are switched on too."""
        names = ",".join(filter(None, (self.environment.get("LOWRANK_ENABLE"), patches)))
        return self.environment | {"LOWRANK_ENABLE": names} if patches else self.environment

    def prepare(self, words: Sequence[str]) -> None:
        """Prepare a corpus, without the output of `scripts/prepare.sh`.

        The module of this script is called itself: if this process is ended, a shell between would leave it running.
        """
        self.show(["scripts/prepare.sh", *words])
        if not self.dry_run:
            command = [sys.executable, "-m", "experiments.corpora", *words]
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode
            if code:
                raise CommandFailed("", code)

    @staticmethod
    def show(words: Sequence[str]) -> None:
        say(f"+ {shlex.join(words)}")


def program(words: Sequence[str]) -> list[str]:
    """Return the words that start a command, with this process's Python for modules."""
    name, *arguments = words
    return [sys.executable, *arguments] if name == "python" else [*words]


def follow(process: subprocess.Popen, said, label: str, every: float = INTERVAL) -> int:
    """Show a process's epochs from its log until it ends, and return its exit status.

    Each `every` seconds the last update is shown, or if there is none, how many batches are done.
    """
    rest, shown, last, count = b"", time.monotonic(), "", Progress(label, unit="batches")

    def show() -> None:
        nonlocal rest, shown, last
        *lines, rest = (rest + said.read()).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if (found := progress(text)) is None:
                count.done, count.total = batches(text) or (count.done, count.total)
                continue
            last = summary(*found)
            if found[0] != "train_inner":
                say(last)
            elif time.monotonic() - shown >= every:
                say(f"  {last}")
            else:
                continue
            shown, last = time.monotonic(), ""

    while True:
        try:
            code = process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            show()
            if time.monotonic() - shown >= every:
                say(f"  {last or count.text()}")
                shown, last = time.monotonic(), ""
        else:
            show()
            return code


def batches(line: str) -> tuple[int, int] | None:
    """Return the number of batches that are done and their total, from a line that fairseq or our `predict` prints, else None."""
    fairseq = (
        r"(?:.* \| INFO \| |INFO:)fairseq\.logging\.progress_bar(?: \| |:):"  # with fairseq's format, or logging's own
    )
    found = re.match(rf"(?:{fairseq}|[\w ]+:)\s+([\d,]+) (?:/|of) ([\d,]+) ", line)
    return (int(found[1].replace(",", "")), int(found[2].replace(",", ""))) if found else None


def summary(tag: str, fields: Mapping[str, str]) -> str:
    """Return a report of progress as one short line."""
    shown = [f"{name} {fields[name]}" for name in ("loss", "ppl", "wps", "num_updates") if name in fields]
    return " | ".join([f"{tag} | epoch {fields.get('epoch', '?')}", *shown])
