"""Read the recorded lines of the evidence in `results/`."""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_lowrank.files import read_lines

ROOT = Path(__file__).parents[2]
RESULTS, PLANNED = ROOT / "results", ROOT / "examples" / "evidence"


@functools.cache
def lines(file: str) -> dict[tuple[str, str], dict[int, dict]]:
    """Return the lines of a file in `results/` by table and row, then by seed. A table of sentence tasks has its task added."""
    found: dict[tuple[str, str], dict[int, dict]] = defaultdict(dict)
    for text in read_lines(RESULTS / file):
        line = json.loads(text)
        table = f"{line['table']}/{line['task']}" if line["table"].startswith("published-bert") else line["table"]
        found[table, line["row"]][line["seed"]] = line
    return {key: dict(sorted(seeds.items())) for key, seeds in found.items()}


def values(table: str, row: str, split: str | None = None, file: str = "evidence.jsonl") -> dict[int, float]:
    """Return the value of a recorded row by seed, or its loss in bits if a split is given."""
    found = lines(file).get((table, row), {})
    return {seed: line["losses"][split]["bits"] if split else line["value"] for seed, line in found.items()}


def differences(rows: Sequence[str], *, logarithm: bool = False, **of: Any) -> list[float]:
    """Return by seed the value of the first row minus that of the second, or the value of a single row.

    Args:
        rows: one or two rows of a table.
        logarithm: True for logarithms of values.
        of: the table, and the split or file if it is not the usual one.
    """
    first, *others = (
        {seed: math.log(value) if logarithm else value for seed, value in values(row=row, **of).items()} for row in rows
    )
    seeds = sorted(first.keys() & others[0]) if others else sorted(first)
    return [first[seed] - others[0][seed] if others else first[seed] for seed in seeds]
