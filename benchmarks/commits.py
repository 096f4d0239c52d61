"""Time of one causal self-attention layer at this commit and at an earlier one: before and after in one run.

    git worktree add ../before 0da9522
    python benchmarks/commits.py --before ../before --clock processor --threads 1

Three processes take turns step by step: the earlier checkout, this one, and the earlier one again, whose ratio is what
the machine makes of no change at all. A step is forward and backward; ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import measure

LAYERS = ("mha", "mixhead-a", "mixhead-b", "mixhead-random", "avghead", "mhe-add", "mhe-mul", "sha", "mqa", "skv", "el")
LAYERS += ("mha+sigsoftmax", "mixhead-a+sigsoftmax", "mhe-add+sigsoftmax")
HERE = Path(__file__).resolve().parents[1]


class Checkout:
    """A process that imports the package of a checkout and times its layers' steps when told to."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        worker = [sys.executable, str(Path(__file__).resolve()), "--worker", "--clock", options.clock]
        if options.threads:
            worker += ["--threads", str(options.threads)]
        self.process = subprocess.Popen(
            worker, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
        )

    def ask(self, **question: object) -> object:
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of {self.process.args} ended: {question}")
        return json.loads(answer)


def work(options: argparse.Namespace) -> None:
    """Answer questions, a line each, until there are no more: build a layer, or time a step of it."""
    import torch

    from fairseq_lowrank.attention import CAUSAL, build_attention

    if options.threads:
        torch.set_num_threads(options.threads)

    def step() -> None:
        layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0].backward(cotangent)
        layer.zero_grad(set_to_none=True)
        x.grad = None

    for line in sys.stdin:
        question = json.loads(line)
        if question:
            preset, _, activation = question["layer"].partition("+")
            torch.manual_seed(0)
            layer = build_attention(preset, 512, 8, self_attention=True, activation=activation or None)
            length = question["length"]
            x = torch.randn(length, max(1, 2048 // length), 512, requires_grad=True)
            cotangent = torch.randn_like(x)
            print(json.dumps(str(Path(sys.modules["fairseq_lowrank"].__file__).parents[1])), flush=True)
        else:
            print(measure.seconds(step, options.clock), flush=True)


def compare(checkouts: dict[str, Checkout], name: str, length: int, rounds: int) -> dict:
    """The times of one layer's step in every checkout."""
    for checkout in checkouts.values():
        checkout.ask(layer=name, length=length)
    times = measure.take_turns({key: checkout.ask for key, checkout in checkouts.items()}, rounds, f"{name} {length}")

    def middle(key: str) -> float:
        return measure.quartiles(measure.ratios(times[key], times["before"]))[1]

    return {
        "layer": name,
        "length": length,
        "milliseconds": round(measure.quartiles(times["after"])[1] * 1e3, 2),
        "ratio": round(middle("after"), 3),
        "control": round(middle("before again"), 3),
    }


def commit(folder: Path) -> str:
    return subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=folder, text=True, check=True, capture_output=True
    ).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout of the earlier commit")
    parser.add_argument("--layers", nargs="+", default=LAYERS, metavar="LAYER", help="PRESET[+sigsoftmax]")
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512, 2048], metavar="N")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    measure.add_common_arguments(parser, rounds=15)
    options = parser.parse_args()
    if options.worker:
        return work(options)
    if options.before is None or not (options.before / "fairseq_lowrank").is_dir():
        parser.error(f"--before {options.before}: expected a checkout of this project")
    before = options.before.resolve()
    folders = {"before": before, "after": HERE, "before again": before}
    checkouts = {name: Checkout(folder, options) for name, folder in folders.items()}
    results = [
        compare(checkouts, name, length, options.rounds) for length in options.lengths for name in options.layers
    ]
    header = ("layer", "n", "ms after", "after / before", "before again / before")
    print(measure.table([result.values() for result in results], header))
    settings = {"before": commit(before), "after": commit(HERE), "rounds": options.rounds, "clock": options.clock}
    machine = {**measure.machine("cpu"), "threads": options.threads}
    measure.write(options.output, {"machine": machine, "settings": settings, "results": results})


if __name__ == "__main__":
    main()
