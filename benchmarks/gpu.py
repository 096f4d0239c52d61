"""What benchmarks/gpu.sh measured, in one file, next to the goals that were set.

python benchmarks/gpu.py FOLDER gpu.json    gathers the results in FOLDER; the goals are printed, and written too
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import measure

A, B = "mixhead-a@triton", "mixhead-b@triton"
LONGEST = 32768


class Goal(NamedTuple):
    """What was to be reached: ``measured`` at most, or at least where ``least``; ``None`` where it was not measured."""

    name: str
    goal: float
    measured: float | None
    least: bool = False

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.goal if self.least else self.measured <= self.goal


def gathered(parts: Path) -> dict:
    """The results of every step that ended, by the names of their files, and how each step ended."""
    steps = [line.split("\t") for line in (parts / "steps").read_text().splitlines()]
    found = {"steps": [{"name": name, "status": int(status), "seconds": int(taken)} for name, status, taken in steps]}
    return found | {file.stem: json.loads(file.read_text()) for file in sorted(parts.glob("*.json"))}


def goals(found: dict) -> Iterator[Goal]:
    """Bfloat16, causal, 16 heads of 64, forward and backward, of the operation alone and of SDPA in the same run."""
    operation = [*_results(found, "operation"), *_results(found, "long")]

    def of(results: list[dict], layer: str, length: int, key: str) -> float | None:
        return next((one[key] for one in results if (one["layer"], one["length"]) == (layer, length)), None)

    for layer, length, goal in ((A, 2048, 3.0), (A, 8192, 2.5), (B, 2048, 4.0), (B, 8192, 4.0)):
        yield Goal(f"{layer}, n {length}: time by flash's", goal, of(operation, layer, length, "ratio"))
    for layer in (A, B):
        preset = layer.partition("@")[0]  # a whole layer takes the backend that "auto" chooses
        for what, results, name in (("attention", operation, layer), ("a layer", _results(found, "layer"), preset)):
            most = max((one["memory_ratio"] for one in results if one["layer"] == name), default=None)
            yield Goal(f"{layer}, every n: memory of {what} by flash's", 1.3, most)
        yield Goal(f"{layer}, n {LONGEST}: milliseconds", float("inf"), of(operation, layer, LONGEST, "milliseconds"))
    formula = _results(found, "formula")
    slow, fast = (of(formula, f"mixhead-a@{backend}", 2048, "milliseconds") for backend in ("reference", "triton"))
    yield Goal("mixhead-a, n 2048: the formula's time by the kernels'", 5.0, slow and fast and slow / fast, least=True)
    ratios = {row["row"]: row["ratio"] for row in _results(found, "training")}
    for preset in ("mixhead-a", "mixhead-b"):
        if preset in ratios:
            yield Goal(f"training with {preset}, n 512: tokens a second by mha's", 0.85, ratios[preset], least=True)


def _results(found: dict, name: str) -> list[dict]:
    return found.get(name, {}).get("results", [])


def table(some: list[Goal]) -> str:
    words = {None: "not measured", True: "yes", False: "no"}
    rows = []
    for one in some:
        goal = "runs" if one.goal == float("inf") else f"{'≥' if one.least else '≤'} {one.goal}"
        rows.append((one.name, goal, "–" if one.measured is None else f"{one.measured:.2f}", words[one.met]))
    return measure.table(rows, ("goal", "", "measured", "met"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path, metavar="FOLDER")
    parser.add_argument("output", type=measure.new_file(".json"))
    options = parser.parse_args()
    found = gathered(options.parts)
    some = list(goals(found))
    written = [{"name": one.name, "goal": str(one.goal), "measured": one.measured, "met": one.met} for one in some]
    print(f"\n{table(some)}\n")
    measure.write(options.output, found | {"goals": written})


if __name__ == "__main__":
    main()
