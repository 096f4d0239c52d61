"""Fill the tables of docs/evidence with the numbers of the recorded lines.

A page has the words: what a table shows, and the label of each row. The numbers come from `results/`.
A row names its recorded row in a comment, such as ``<!-- h4-mha -->``, or as the code in its first cell. A cell with "–" stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from statistics import fmean

from experiments.controlled.runs import geometric_mean
from experiments.evidence import documents, leads, measure, published_models, slowdown
from experiments.evidence.lines import RESULTS, ROOT, differences, lines, values
from fairseq_lowrank.records.statistics import student
from fairseq_lowrank.tools.measuring.verdict import TOLERANCE

PAGES = ROOT / "docs" / "evidence"
NOTHING = "–"

Row = dict[str, str]
Filler = Callable[[list[Row]], list[Row]]
"""Takes the rows of a table, each with its cells by column. Returns the rows with their numbers."""


def filled(name: str) -> str:
    """Return the text of a page, by its name without ".md", with its numbers as recorded."""
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")

    def fill(match: re.Match) -> str:
        header, rule, *found = match[0].splitlines()
        columns = cells(header)
        rows = [dict(zip(columns, cells(line), strict=True)) for line in found]
        for wanted, filler in TABLES.get(name, {}).items():
            if set(wanted) <= set(columns):
                rows = filler(rows)
        return "\n".join([header, rule, *(line_of(row.values()) for row in rows), ""])

    return re.sub(r"(?:^\|.*\n)+", fill, text, flags=re.MULTILINE)


def cells(line: str) -> list[str]:
    """Return the cells of a line of a table."""
    return [cell.strip() for cell in line.strip()[1:-1].split("|")]


def line_of(row: Iterable[str]) -> str:
    """Return a line of a table with these cells."""
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in row)


def key_of(row: Row) -> str:
    """Return the recorded row that a row of a page names in its first cell."""
    cell = next(iter(row.values()))
    named = re.search(r"<!-- (\S+) -->", cell) or re.match(r"`([^`]+)`", cell)
    if named is None:
        raise ValueError(f"{cell}: names no recorded row. Add <!-- ROW --> to its first cell.")
    return named[1]


def each(change: Callable[[str], Row]) -> Filler:
    """Fill a table whose rows are given. ``change`` takes the recorded row that a row names, and returns new cells."""
    return lambda rows: [
        row | {name: cell for name, cell in change(key_of(row)).items() if row[name] != NOTHING} for row in rows
    ]


def whole(markdown: Callable[[], str]) -> Filler:
    """Replace the rows of a table by those that a function prints, in the columns of the page."""

    def fill(rows: list[Row]) -> list[Row]:
        header, _, *found = map(cells, markdown().splitlines())
        names = rows[0] if rows else header  # the columns of a table without rows are not known here
        return [{name: row[header.index(name)] for name in names} for row in found]

    return fill


def held(method: str) -> Row:
    """Return the errors of a method in the tasks of "What a head can hold"."""
    found = {
        column: [
            line["value"]
            for line in lines("evidence-matrices.jsonl.gz").get(("matrices", f"{at}-{method}"), {}).values()
        ]
        for column, at in (
            ("one pattern, 8 × 8", "n16-shared-h8"),
            ("one pattern, 16 × 4", "n16-shared-h16"),
            ("eight patterns, 16 × 4", "n16-own-h16"),
        )
    }
    point = values(
        "nearest-point",
        f"h8-{'fixedhead-32' if method == 'fixedhead' else method}",
        file="evidence-nearest-point.jsonl",
    )
    new = {column: two_digits(geometric_mean(one)) for column, one in found.items() if one}
    return new | ({"nearest point, 8 × 4": f"{fmean(point.values()):.3f}"} if point else {})


def two_digits(value: float) -> str:
    """Return an error with two digits."""
    return f"{value:.1e}".replace("e-0", "e-") if value < 0.01 else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def language_model(name: str) -> Row:
    """Return the loss of a language model after 2,000 and 6,000 updates, and its slow-down."""
    short, long = (values("language-model", name + end, "test").values() for end in ("", "-6000"))
    new = {"2,000 updates": f"{fmean(short):.4f}", "seeds": str(len(short))}
    if long:
        new["6,000 updates"] = f"{fmean(long):.4f}"
    if long and name != "h4-mha":
        for updates, by_seed in slowdown.factors(name).items():
            new[f"m at {updates:,}"] = f"{fmean(m.value for m in by_seed.values()):.2f}"
        new["m at 6,000, in time"] = f"{fmean(m.value for m in by_seed.values()) * slowdown.TIME.get(name, 1):.2f}"
    return new


def tuned(name: str) -> Row:
    """Return the loss of a language model after 2,000 updates at the rate that its name ends with."""
    found = values("language-model", name, "test").values()
    return {"2,000 updates": f"{fmean(found):.4f}", "seeds": str(len(found))}


def accuracy(names: str) -> Row:
    """Return how far one row of the published BERT is ahead of another, in points."""
    new = {}
    for column, task in (("sentence polarity", "sentence-polarity"), ("RTE", "rte")):
        found = differences(names.split(","), table=f"published-bert-all-MiniLM-L6-v2/{task}")
        low, high = student(found)[:2]
        new[column] = f"{fmean(found):.2f} ({low:.2f} to {high:.2f})".replace("-", "−")
    return new


def need(model: str) -> Row:
    """Return the needs of a model by seed, at the tolerance of the verdict."""
    found = [line for line in measure.read(RESULTS / "evidence-measure.jsonl") if line["model"] == model]
    needs = ", ".join(str(measure.need(line, TOLERANCE)) for line in found)
    return {"need by seed": f"{needs} of {found[0]['size']}"}


TABLES: dict[str, dict[tuple[str, ...], Filler]] = {
    "documents": {columns: whole(partial(documents.markdown, columns)) for columns in documents.TABLES},
    "heads": {("method", "nearest point, 8 × 4"): each(held)},
    "language-models": {("row", "m at 2,000"): each(language_model), ("row", "best rate"): each(tuned)},
    "translation": {("row", "4 heads of 32", "32 heads of 4"): whole(leads.markdown)},
    "published-models": {
        ("difference", "RTE"): each(accuracy),
        ("model, text, sequences",): whole(
            lambda: published_models.table(
                published_models.longest(measure.read(RESULTS / "evidence-published-models.jsonl"))
            )
        ),
    },
    "measure": {("need by seed",): each(need)},
}
"""For each page, what fills the tables that have these columns."""
