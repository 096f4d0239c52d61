"""What one command of benchmarks/gpu.sh measured, in one file, next to the goals that were set.

python benchmarks/gpu.py FOLDER FILE.json    gathers the results in FOLDER; the goals are printed, and written too
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import measure


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
    """Bfloat16, causal, heads of 64, forward and backward; ratios are to the faster of flash attention and cuDNN."""
    operation = _results(found, "operation")
    checked = [row for name in found if name.startswith("values-") for row in _results(found, name)]
    layers = [row["layer"] for name in ("operation", "glue") for row in _results(found, name)]
    backends = [layer.partition("@")[2] for layer in layers if layer.startswith("mixhead-a@")]
    for backend in dict.fromkeys((*backends, *(row["backend"] for row in checked))):
        a, b = f"mixhead-a@{backend}", f"mixhead-b@{backend}"
        own = [row for row in checked if row["backend"] == backend]
        wrong = sum(not (row.get("right") and row["same_bits"]) for row in own)
        yield Goal(f"{backend}: wrong values, or other bits in a second run", 0, wrong if own else None)
        yield Goal(f"{a}, attend alone, n 8192: ps a score", 2.2, _attend(found, backend))
        for length in (2048, 8192):
            yield Goal(f"{a}, n {length}: ps a score", 8.0, _one(operation, a, length, "picoseconds_per_score"))
        for length, goal in ((2048, 3.5), (8192, 4.5)):
            yield Goal(f"{a}, n {length}: time by the fastest SDPA's", goal, _one(operation, a, length, "ratio"))
        for length, goal in ((2048, 2.2), (8192, 3.0), (32768, 4.0)):
            measured = _one(_results(found, "glue"), a, length, "ratio")
            yield Goal(f"{a}, n {length}: the same with glue, as published before", goal, measured)
        pairs = (
            (f"{b} by mixhead-a", 1.2, ("operation", b), ("operation", a)),
            (f"{a} with 8 heads by 16, per score", 1.0, ("heads-8", a), ("operation", a)),
            (f"{a} with dropout 0.1 by none", 1.4, ("dropout", a), ("operation", a)),
        )
        for name, goal, *places in pairs:
            taken, base = (_one(_results(found, file), layer, 2048, "picoseconds_per_score") for file, layer in places)
            yield Goal(f"{name}, n 2048: time", goal, taken and base and taken / base)
        memory = [row["memory_ratio"] for row in operation if row["layer"] in (a, b) and row["memory_ratio"]]
        yield Goal(f"mixhead-a and -b@{backend}, every n: memory by SDPA's", 1.3, max(memory, default=None))
    for row in _results(found, "training"):
        if row["row"].startswith("mixhead-") and not row["row"].endswith("@blocked"):
            name = f"training with {row['row']}, n 512: tokens a second by mha's"
            yield Goal(name, 0.85, row["ratio"], least=True)


def _results(found: dict, name: str) -> list[dict]:
    return found.get(name, {}).get("results", [])


def _one(results: list[dict], layer: str, length: int, key: str) -> float | None:
    return next((one[key] for one in results if (one["layer"], one["length"]) == (layer, length)), None)


def _attend(found: dict, backend: str) -> float | None:
    """Picoseconds a score of the pass that mixes, of 16 heads, as a backend launches it."""
    place = {"backend": backend, "composition": "mixhead-a", "heads": 16, "length": 8192}
    wanted = place | {"kernel": "attend", "variant": ""}
    rows = [row for row in _results(found, "passes") if wanted.items() <= row.items()]
    return next((row["picoseconds_per_score"] for row in rows if "picoseconds_per_score" in row), None)


def table(some: list[Goal]) -> str:
    words = {None: "not measured", True: "yes", False: "no"}
    rows = []
    for one in some:
        goal = f"{'≥' if one.least else '≤'} {one.goal:g}"
        rows.append((one.name, goal, "–" if one.measured is None else f"{one.measured:.2f}", words[one.met]))
    return measure.table(rows, ("goal", "", "measured", "met"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path, metavar="FOLDER")
    parser.add_argument("output", type=measure.new_file(".json"), metavar="FILE.json")
    options = parser.parse_args()
    found = gathered(options.parts)
    some = list(goals(found))
    written = [{"name": one.name, "goal": one.goal, "measured": one.measured, "met": one.met} for one in some]
    print(f"\n{table(some)}\n")
    measure.write(options.output, found | {"goals": written})


if __name__ == "__main__":
    main()
