"""Cost of the core: against PyTorch's SDPA, against the layer, and against the layer of another clone.

    python benchmarks/core.py --before CLONE --output benchmarks/results/core.json

Every subject runs in its own process with one thread, and they take turns in every round. A ratio is the median of a subject's times
over that of the layer ``before``, or of the layer itself without ``--before``. ``--again`` adds a second process of the layer, whose ratio
to the first shows the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("mha", "mixhead-a", "mixhead-b")
CELLS = {  # width, heads, batch, length, what is measured, calls in a round, rounds
    "small call, forward": (64, 4, 4, 16, "forward", 40, 41),
    "small call, training": (64, 4, 4, 16, "training", 20, 41),
    "decoding step": (64, 4, 4, 16, "step", 40, 41),
    "n 2048, forward": (512, 8, 1, 2048, "forward", 1, 5),
    "n 2048, training": (512, 8, 1, 2048, "training", 1, 5),
}


def make(subject: str, method: str, width: int, heads: int, batch: int, length: int, mode: str) -> Callable[[], object]:
    """Return a call of a subject: ``core``, ``sdpa`` or a layer."""
    from fairseq_lowrank.attention import CAUSAL, build_attention

    torch.manual_seed(0)
    learns = mode == "training"
    x = torch.randn(batch, length, width, requires_grad=learns)
    q, k, v = (torch.randn(batch, heads, length, width // heads, requires_grad=learns) for _ in "qkv")
    last = q[:, :, -1:]

    def forward() -> torch.Tensor:
        if subject == "sdpa":
            queries = last if mode == "step" else q
            return torch.nn.functional.scaled_dot_product_attention(queries, k, v, is_causal=mode != "step")
        if subject == "core":
            return core(*((last, k, v) if mode == "step" else (q, k, v)), "causal")
        if mode == "step":
            return layer(x[:, -1:], x[:, -1:], x[:, -1:], incremental_state=dict(saved), need_weights=False)[0]
        return layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0]

    if subject == "core":
        from fairseq_lowrank.attention import build_core

        core = build_core(method, heads, width // heads).train(learns)
    elif subject != "sdpa":
        layer = build_attention(method, width, heads, self_attention=True, batch_first=True).train(learns)
        saved: dict = {}
        if mode == "step":
            layer(x, x, x, incremental_state=saved, need_weights=False, attn_mask=CAUSAL)
    return (lambda: forward().sum().backward()) if learns else forward


def work(subject: str) -> None:
    """Answer each line of the input, a cell, with the seconds of one call."""
    torch.set_num_threads(1)
    calls: dict[str, Callable[[], object]] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        method, *sizes, mode, count = json.loads(line)
        with torch.set_grad_enabled(mode == "training"):
            if line not in calls:
                calls = {line: make(subject, method, *sizes, mode)}
                for _ in range(5):
                    calls[line]()
            start = time.perf_counter()
            for _ in range(count):
                calls[line]()
            print(json.dumps((time.perf_counter() - start) / count), flush=True)


def start(subject: str, clone: Path) -> subprocess.Popen:
    environment = dict(os.environ, PYTHONPATH=str(clone), OMP_NUM_THREADS="1")
    command = [sys.executable, "-W", "ignore", __file__, "--work", subject]
    worker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=clone
    )
    assert worker.stdout is not None
    worker.stdout.readline()
    return worker


def seconds(worker: subprocess.Popen, cell: list) -> float:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(json.dumps(cell) + "\n")
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="clone of an earlier version, whose layer is the baseline")
    parser.add_argument("--again", action="store_true", help="measure the layer in a second process, for the noise")
    parser.add_argument("--rounds", type=int, help="number of rounds (default: 41 of small calls, 5 of long ones)")
    parser.add_argument("--output", type=Path, help="JSON file with all medians")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work)
    clones = {"layer": ROOT, "core": ROOT, "sdpa": ROOT}
    clones |= {"before": options.before.resolve()} if options.before else {}
    clones |= {"again": ROOT} if options.again else {}
    workers = {name: start(name, clone) for name, clone in clones.items()}
    baseline, results = "before" if options.before else "layer", []
    for label, (*sizes, mode, count, rounds) in CELLS.items():
        for method in METHODS:
            names = [name for name in workers if name != "sdpa" or method == "mha"]
            times: dict[str, list[float]] = {name: [] for name in names}
            for turn in range(options.rounds or rounds):
                for name in names if turn % 2 else names[::-1]:
                    times[name].append(seconds(workers[name], [method, *sizes, mode, count]))
            medians = {name: statistics.median(own) for name, own in times.items()}
            results.append({"cell": label, "method": method, "seconds": medians})
            ratios = "  ".join(f"{name} {medians[name] / medians[baseline]:.3f}" for name in names)
            print(f"{label:22} {method:10} {ratios}  ({baseline} {medians[baseline] * 1e3:.3f} ms)", flush=True)
    for worker in workers.values():
        worker.communicate()
    if options.output:
        options.output.write_text(json.dumps({"torch": torch.__version__, "cells": results}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
