"""What the benchmarks share: alternating measurements, peak memory, a description of the machine, tables."""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm

CLOCKS = {"elapsed": time.perf_counter, "processor": time.process_time}
Found = TypeVar("Found")
PACKAGES = ("torch", "fairseq-fixed", "x-transformers", "transformers", "numpy", "triton")


def machine(device: str) -> dict[str, str | int]:
    """Date, processor, threads, versions and code, as every file of results records them."""
    from fairseq_lowrank.records import (
        provenance,  # other copies of the package, which versions.py times, may not have it
    )

    name = platform.processor() or platform.machine()
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        models = [line.split(":")[1].strip() for line in cpu.read_text().splitlines() if line.startswith("model name")]
        name = models[0] if models else name
    described = {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": torch.cuda.get_device_name() if device.startswith("cuda") else name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            described[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return described | {
        "commit": provenance.commit(provenance.PACKAGE.parent),
        "code": provenance.code(provenance.PACKAGE),
    }


def add_common_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.add_argument("--rounds", type=int, default=rounds, help=f"measurements of each (default: {rounds})")
    parser.add_argument("--threads", type=int, help="threads of torch on the CPU (default: torch's own choice)")
    parser.add_argument(
        "--clock",
        default="elapsed",
        choices=CLOCKS,
        help="processor: seconds of the CPU itself, for a machine that others use too; with --threads 1",
    )
    parser.add_argument("--output", type=new_file(".json"), help="write the results to this JSON file")


def new_file(*endings: str) -> Callable[[str], Path]:
    """For argparse: a file that can be written, checked before anything is measured."""

    def file(text: str) -> Path:
        path = Path(text)
        nearest = next(folder for folder in path.absolute().parents if folder.exists())
        if path.suffix not in endings or path.is_dir():
            raise argparse.ArgumentTypeError(f"{text}: expected a file ending in {' or '.join(endings)}")
        if path.exists() and not path.is_file():
            raise argparse.ArgumentTypeError(f"{text}: exists, and it has no results")
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise argparse.ArgumentTypeError(f"{text}: {nearest} is no folder that can be written to")
        return path

    return file


def shape(text: str) -> tuple[int, int]:
    """For argparse: heads and their size."""
    heads, _, size = text.partition("x")
    if not (heads.isdecimal() and size.isdecimal() and int(heads) and int(size)):
        raise argparse.ArgumentTypeError(f"{text}: expected heads and their size, such as 16x64")
    return int(heads), int(size)


def alternate(
    runs: dict[str, Callable[[], object]], rounds: int, label: str = "", clock: str = "elapsed"
) -> dict[str, list[float]]:
    """Run everything once a round, so that what else the machine does falls on all alike.

    Args:
        runs: name → what is timed.
        rounds: measurements of each, after one to warm up.
        label: of the progress bar.
        clock: one of :data:`CLOCKS`.

    Returns:
        name → seconds in each round.
    """
    return take_turns({name: partial(seconds, run, clock) for name, run in runs.items()}, rounds, label)


def take_turns(measurements: dict[str, Callable[[], Found]], rounds: int, label: str = "") -> dict[str, list[Found]]:
    """:func:`alternate` of what returns its measurement itself."""
    found: dict[str, list[Found]] = {name: [] for name in measurements}
    names = list(measurements)
    for turn in tqdm(range(-1, rounds), desc=label, leave=False, disable=None):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken = measurements[name]()
            if turn >= 0:
                found[name].append(taken)
    return found


def seconds(run: Callable[[], object], clock: str) -> float:
    """What ``run`` takes by one of :data:`CLOCKS`."""
    start = CLOCKS[clock]()
    run()
    return CLOCKS[clock]() - start


class Stopwatch:
    """Times between marks: by events on a GPU, else by a clock of the host.

    A GPU is kept busy until the first mark. So what follows is queued before it begins, and times hold no gap in which the GPU
    waits for Python.

    Args:
        device: where the work is done.
        clock: one of :data:`CLOCKS`, of the host.
    """

    def __init__(self, device: str, clock: str = "elapsed") -> None:
        self.by_events = device.startswith("cuda")
        self.clock, self.marks = CLOCKS[clock], []
        if self.by_events:
            _occupy(device)

    def mark(self) -> None:
        if self.by_events:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
            return
        self.marks.append(self.clock())

    def laps(self) -> tuple[list[float], bool]:
        """Seconds between the marks, and whether the GPU began before all was queued."""
        if not self.by_events:
            return [end - start for start, end in pairwise(self.marks)], False
        late = self.marks[0].query()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(self.marks)], late


@functools.cache
def _filler(device: str) -> torch.Tensor:
    """More than the cache of any GPU holds, so that filling it empties the cache too."""
    return torch.empty(1 << 28, dtype=torch.uint8, device=device)


def _occupy(device: str) -> None:
    """Give a GPU several milliseconds of work."""
    for _ in range(40):
        _filler(device).zero_()


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The median between the quartiles: ``(q1, median, q3)``."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, median, q3


def ratios(values: list[float], baseline: list[float]) -> list[float]:
    """The ratio of each round."""
    return [value / base for value, base in zip(values, baseline, strict=True)]


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """The most memory of tensors that ``run`` holds at once beyond what there was before it."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces its start and stop otherwise
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held, default=0)


def write(path: Path | None, results: dict) -> None:
    if path is not None:
        from fairseq_lowrank.files import whole_file

        with whole_file(path) as file:
            file.write(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        print(f"wrote {path}")


def table(rows: Iterable[Iterable[object]], header: Iterable[str]) -> str:
    """A Markdown table whose columns line up."""
    lines = [[str(cell) for cell in row] for row in (list(header), *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )
