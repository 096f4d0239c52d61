"""The papers' published values, and the names of their tables and rows."""

from __future__ import annotations

import json
import re
from importlib import resources

from fairseq_lowrank.attention import PRESETS


def load_papers() -> dict:
    """Return the papers' published values, by paper and table, with their sources."""
    return json.loads(resources.files(__package__).joinpath("values.json").read_text(encoding="utf-8"))


def canonical_paper(name: str) -> str:
    return name.lower().replace("-", "_")


def canonical_table(name: str | int) -> str:
    """Return one name for a table: `4`, `Table 4` and `table4` give `table4`."""
    name = re.sub(r"[\s_]+", "", str(name).lower())
    return f"table{name}" if name[:1].isdigit() else name


def canonical_row(name: str) -> tuple[str, str | None]:
    """Return one key for a row: `h4-mixhead-a` and `mixhead-a-h4` give the same. Other words keep their order."""
    return split_row(re.sub(r"[-_\s]+", "-", name.lower()))


def split_row(name: str) -> tuple[str, str | None]:
    """Split a row's name into the rest and the preset (None if it names none): ("h4", "mixhead-a")."""
    for preset in sorted(PRESETS, key=len, reverse=True):
        rest, count = re.subn(rf"(?:^|(?<=-)){re.escape(preset)}(?:-|$)", "", name, count=1, flags=re.I)
        if count:
            return rest.strip("-"), preset
    return name, None
