"""What benchmarks/gpu.sh measured, in one file, next to the goals that were set.

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
    """In bfloat16, causal, forward and backward, attention alone; ratios are to the faster of flash attention and cuDNN.

    The older set of kernels can go when the first two are met.
    """
    checked = [row for name in found if name.startswith(("values-", "kinds-")) for row in _results(found, name)]
    own = [row for row in checked if row["backend"] == "tiled" and "refused" not in row]
    wrong = sum(not (row.get("right") and row["same_bits"]) for row in own)
    yield Goal("tiled: wrong values, or other bits in a second run", 0, wrong if own else None)
    timed = {(row["layer"], *_shape(row)): row for name in ("operation", "others") for row in _results(found, name)}
    pairs = [(row, timed.get((layer.replace("@tiled", "@triton"), *shape))) for (layer, *shape), row in timed.items() if layer.endswith("@tiled")]  # fmt: skip
    slower = sum(other is not None and row["milliseconds"] >= other["milliseconds"] for row, other in pairs)
    yield Goal("tiled: shapes and lengths where triton is as fast or faster", 0, slower if pairs else None)
    attend = {"backend": "tiled", "kernel": "attend", "variant": "", "length": 8192, "heads": 16}
    passes = [row for row in _results(found, "passes") if attend.items() <= row.items()]
    alone = next((row["picoseconds_per_score"] for row in passes if "picoseconds_per_score" in row), None)
    yield Goal("16 heads of 64, mixhead-a, attend alone, n 8192: ps a score", 2.2, alone)
    for layer, goal in (("mixhead-a", 8.0), ("mixhead-b", 10.0)):
        for length in (2048, 8192):
            row = timed.get((f"{layer}@tiled", 16, 64, length), {})
            yield Goal(f"16 heads of 64, {layer}, n {length}: ps a score", goal, row.get("picoseconds_per_score"))
    for length, goal in ((2048, 3.5), (8192, 4.5)):
        row = timed.get(("mixhead-a@tiled", 16, 64, length), {})
        yield Goal(f"16 heads of 64, mixhead-a, n {length}: time by the fastest SDPA's", goal, row.get("ratio"))
    memory = [row["memory_ratio"] for row, _ in pairs if row["memory_ratio"]]
    yield Goal("tiled: memory by SDPA's", 1.3, max(memory, default=None))
    trained = next((row["ratio"] for row in _results(found, "training") if row["row"] == "mixhead-a@tiled"), None)
    yield Goal("training with mixhead-a, n 512: tokens a second by mha's", 0.85, trained, least=True)


def _shape(row: dict) -> tuple[int, int, int]:
    return row["heads"], row["head_dim"], row["length"]


def _results(found: dict, name: str) -> list[dict]:
    return found.get(name, {}).get("results", [])


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
