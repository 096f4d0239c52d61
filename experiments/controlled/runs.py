"""Runs of controlled tasks, their logs and their lines."""

from __future__ import annotations

import functools
import gzip
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor, nn

from experiments.engine import Engine, finished, refuse_dirty
from experiments.machine import machine
from experiments.papers.comparison import attention_flags
from fairseq_lowrank.attention import AXES, PRESETS
from fairseq_lowrank.files import named_if_full
from fairseq_lowrank.messages import flag_name
from fairseq_lowrank.records import provenance
from fairseq_lowrank.records.locks import append_whole, locked
from fairseq_lowrank.records.results import append_measurement, check_writable

PAPER = "evidence"
SMALLEST = 1e-12
"""The smallest error that counts. Rounding can make even smaller ones negative."""

Log = Callable[[str], None]
Model = TypeVar("Model", bound=nn.Module)


def learning_rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: linear from 0 over the first 5 %, then a cosine to 0."""
    warmup = max(1, round(0.05 * steps))
    if step < warmup:
        return step / warmup
    return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2


def trained_on_new_problems(
    build: Callable[[], Model],
    loss_on: Callable[[Model, torch.Generator], Tensor],
    rate: float,
    seed: int,
    steps: int,
    log: Log,
) -> Model:
    """Return a model trained by AdamW (betas 0.9 and 0.95, no weight decay), with new problems in each update.

    Args:
        build: makes the model; random numbers follow from `seed`.
        loss_on: draws problems with a generator, and returns the model's error on them.
        rate: the highest learning rate.
        log: is given the update and its error, every 500 updates.
    """
    torch.manual_seed(seed)
    model = build()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step + 1, steps))
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_on(model, generator)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 500 == 0:
            log(f"{step} {loss.item():.6g}")
    return model


@torch.no_grad()
def outcome_on_new_problems(
    model: Model, loss_on: Callable[[Model, torch.Generator], Tensor], batches: int, seed: int
) -> dict:
    """Return ``value``, the mean error on new problems, the same for all models of a seed, and ``parameters``."""
    generator = torch.Generator().manual_seed(1_000_000 + seed)
    return {
        "value": statistics.fmean(loss_on(model, generator).item() for _ in range(batches)),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


class Journal:
    """A run's log.

    Args:
        head: the first line of the log.
        show: takes every line of the log as it is written.

    Attributes:
        lines: the log so far.
    """

    def __init__(self, head: str, show: Log = lambda line: None) -> None:
        self.lines, self._show = [head], show
        self._start = time.process_time()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self._show(line)

    @property
    def seconds(self) -> float:
        """Processor time of the run so far."""
        return time.process_time() - self._start


@dataclass(frozen=True)
class Method:
    """A row's attention: a preset, and axes put over it.

    Args:
        name: how rows call it.
        preset: a value of ``--attention``.
        axes: axis values that override the preset's, see :class:`~fairseq_lowrank.attention.AttentionSpec`.
    """

    name: str
    preset: str
    axes: dict[str, int | str] = field(default_factory=dict)

    def exists(self) -> bool:
        """Return True if this version of the package has the preset and the axes."""
        return self.preset in PRESETS and set(self.axes) <= AXES.keys()


@dataclass(frozen=True)
class Run:
    """One training: a row of a table with one seed.

    Args:
        setting_name: names the setting.
        seed: of the problem and of the start.
        method: what attends.
        steps: updates.
        usual_steps: the task's number of updates. Another number makes a separate row, a trial if it is smaller.
        setting: what else a line says of the run.
        train: trains; takes ``seed``, ``steps`` and the journal; returns further fields of the line, ``parameters`` and
            ``value`` among it.
    """

    setting_name: str
    seed: int
    method: Method
    steps: int
    usual_steps: int
    setting: dict[str, object]
    train: Callable[[int, int, Journal], dict]

    @property
    def row(self) -> str:
        """The name of its row."""
        return self.setting_name + ("" if self.steps == self.usual_steps else f"-{self.steps}-updates")

    def __str__(self) -> str:
        return f"{self.row} seed {self.seed}"

    @property
    def smoke(self) -> bool:
        """Whether it is a trial, whose line does not count as a result."""
        return self.steps < self.usual_steps


def table(lines: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """Return the names of columns and the rows of a table of finished runs: the values of each row by seed, and their mean."""
    rows: dict[str, list[dict]] = {}
    for line in lines:
        rows.setdefault(line["row"], []).append(line)
    body = []
    for row, found in rows.items():
        found = sorted(found, key=lambda line: line["seed"])
        values = [line["value"] for line in found]
        seeds = ", ".join(f"{line['seed']}: {line['value']:.4g}" for line in found)
        sizes = f"{found[0]['heads']} × {found[0]['head_dim']}"
        body.append([row, sizes, seeds, f"{statistics.fmean(values):.4g}", f"{geometric_mean(values):.4g}"])
    return ["row", "heads × size", f"{lines[0]['metric']}, by seed", "mean", "geometric mean"], body


class TaskEngine(Engine[Run]):
    """Runs the rows of a controlled task.

    Args:
        task: a module of :data:`~experiments.controlled.TASKS`.
        runs: runs of the task.
        results: the ``.jsonl`` file; what it has is not run again.
        log: a ``.gz`` file to which each run's log is appended.
        say: takes one line for each run that has ended.
        show: takes how far the current run is.
    """

    def __init__(
        self,
        task: ModuleType,
        runs: Sequence[Run],
        results: Path,
        log: Path | None = None,
        say: Log = print,
        show: Log = lambda line: None,
    ) -> None:
        super().__init__(PAPER, task.TABLE, results, say)
        self.task, self._runs, self.log, self.show = task, runs, log, show
        self.commit = checked_out_commit()
        this_code()
        if log is not None:
            check_writable(log)

    def runs(self) -> Sequence[Run]:
        return self._runs

    def lock_file(self, run: Run) -> Path:
        return self.results.with_name(f"{self.results.stem}.{run.row}-seed{run.seed}.lock")

    def train(self, run: Run, handle: int) -> None:
        """Train a run, and append its log and its line."""
        if not run.smoke:
            refuse_dirty(self.commit)

        def show(line: str) -> None:
            self.show(f"{self.place}, {run}: {line}")

        journal = Journal(f"# {run} commit {self.commit}", show)
        outcome = run.train(run.seed, run.steps, journal)
        seconds = journal.seconds
        journal(f"{self.task.METRIC} {outcome['value']:.6g}, {seconds:.1f} s")
        if self.log is not None:
            data = gzip.compress(("\n".join(journal.lines) + "\n").encode(), mtime=0)
            with named_if_full(self.log), locked(self.log, os.O_RDWR | os.O_CREAT | os.O_APPEND) as log:
                assert log is not None  # it waits for other processes
                append_whole(log, data)  # a part would make the rest of the file unreadable
        append_measurement(self.results, as_line(self.task, run, outcome, seconds, self.commit))
        self.say(f"{run}: {self.task.METRIC} {outcome['value']:.3g} ({seconds:.1f} s)")
        self.lock_file(run).unlink(missing_ok=True)  # whoever opened the old file finds the line


def as_line(task: ModuleType, run: Run, outcome: dict, seconds: float, commit: str) -> dict:
    """Return the line of a finished run. Its ``seconds`` are processor time."""
    axes = "".join(f" {flag_name(axis)} {value}" for axis, value in run.method.axes.items())
    return {
        "paper": PAPER,
        "table": task.TABLE,
        "row": run.row,
        "seed": run.seed,
        **provenance.origin(provenance.PACKAGE, Path(__file__).parent),
        "machine": machine(1),
        "commit": commit,
        "code": this_code(),
        "method": run.method.name,
        **run.setting,
        "model": task.ARCHITECTURE,
        "flags": f"--attention {run.method.preset}{axes}",
        "steps": run.steps,
        "updates": run.steps,
        "metric": task.METRIC,
        **outcome,
        "split": task.SPLIT,
        "seconds": round(seconds, 2),
        "smoke": run.smoke,
    }


@functools.cache  # files may change later, and this process runs what it has imported
def this_code() -> str:
    """Return the identity of the code that runs: that of the package and of the controlled tasks."""
    return provenance.code(provenance.PACKAGE, Path(__file__).parent)


def origin_here() -> dict:
    """Return the commit, the code, the versions, the date and the processor of a measurement by this package and experiments."""
    folders = (provenance.PACKAGE, Path(__file__).parents[1])
    return provenance.origin(*folders) | {"machine": machine(torch.get_num_threads())}


def checked_out_commit() -> str:
    """Return the commit of the code that runs, see :func:`~fairseq_lowrank.records.provenance.commit`."""
    return provenance.commit(provenance.PACKAGE.parent)


def lines_of(task: ModuleType, results: Path, steps: int | None = None) -> list[dict]:
    """Read the task's lines whose runs were to have so many updates, by default the task's, in the order of its runs.

    Of lines of one row and seed the last one counts.
    """
    steps = task.STEPS if steps is None else steps
    found = [line for line in finished(results, PAPER, task.TABLE).values() if line.get("steps", task.STEPS) == steps]
    runs = task.runs(steps=steps)
    order = {row: place for place, row in enumerate(dict.fromkeys(run.row for run in runs))}
    return sorted(found, key=lambda line: order.get(line["row"], len(order)))


def styles_of(lines: Sequence[dict], names: Sequence[str]) -> list[dict]:
    """Return the style of each method in a picture: its colour follows the attention in the flags of its lines."""
    from fairseq_lowrank.tools import pictures

    flags = {line["method"]: line for line in lines}
    return pictures.styles(pictures.kind_of_flags(attention_flags(flags[name])) for name in names)


def geometric_mean(values: Iterable[float]) -> float:
    """Return the mean of what spans orders of magnitude; values below :data:`SMALLEST` count as that."""
    return statistics.geometric_mean([max(value, SMALLEST) for value in values])
