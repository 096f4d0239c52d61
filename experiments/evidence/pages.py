"""Fill the tables of docs/evidence with the numbers of the recorded lines.

A page has the words: what a table shows, and the label of each row. The numbers come from `results/`.
A row names its recorded row in a comment, such as ``<!-- h4-mha -->``, or as the code in its first cell.
A number is rounded to as many digits as its cell has, so a row that is added by hand has cells such as 0.000. A new seed of a
training gets its row, with the digits of the row above it.
"""

from __future__ import annotations

import csv
import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import fmean, median

from experiments.controlled import regression
from experiments.controlled.runs import geometric_mean
from experiments.evidence import gains, measure, slowdown
from experiments.evidence.lines import PLANNED, RESULTS, ROOT, lines
from fairseq_lowrank.tools.reporting import contrasts

PAGES = ROOT / "docs" / "evidence"
LOSSES = {"training loss": "fit", "validation": "valid", "test": "test"}
BETTER = "better, by the interval"
SHUFFLED_SOURCE = "bits per token that a shuffled source costs"

Row = dict[str, str]
Filler = Callable[[list[Row], str], list[Row]]
"""Takes the rows of a table, each with its cells by column, and the heading above it. Returns the rows with their numbers."""


def filled(name: str) -> str:
    """Return the text of a page, by its name without ".md", with its numbers as recorded."""
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")

    def fill(match: re.Match) -> str:
        header, rule, *lines = match[0].splitlines()
        columns, heading = cells(header), re.findall(r"^##+ (.+)$", text[: match.start()], re.MULTILINE)[-1]
        rows = [dict(zip(columns, cells(line), strict=True)) for line in lines]
        before = {tuple(row.values()): line for row, line in zip(rows, lines, strict=True)}
        for wanted, filler in TABLES.get(name, {}).items():
            if set(wanted) <= set(columns):
                rows = filler(rows, heading)
        after = [tuple(row.values()) for row in rows]
        return "\n".join([header, rule, *(before.get(row) or line_of(row) for row in after), ""])

    return re.sub(r"(?:^\|.*\n)+", fill, text, flags=re.MULTILINE)


def cells(line: str) -> list[str]:
    """Return the cells of a line of a table."""
    return [cell.strip() for cell in line.strip()[1:-1].split("|")]


def line_of(row: Iterable[str]) -> str:
    """Return a line of a table with these cells."""
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in row)


def key_of(row: Row) -> str | None:
    """Return the recorded row that a row of a page names in its first cell, if it names one."""
    cell = next(iter(row.values()))
    named = re.search(r"<!-- (\S+) -->", cell) or re.match(r"`([^`]+)`", cell)
    return named and named[1]


def like(cell: str, value: float) -> str:
    """Return a value with as many digits as the number in a cell has."""
    mantissa, _, exponent = cell.replace("−", "-").partition("e")
    digits = len(mantissa.partition(".")[2])
    if exponent:
        mantissa, exponent = f"{value:.{digits}e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−", int(value < 0))
    return f"{value:z.{digits}f}".replace("-", "−")


def several(cell: str, values: Iterable[float]) -> str:
    """Return values in a row, with the digits of the numbers in a cell. What comes after the numbers stays."""
    numbers, after = re.fullmatch(r"((?:[−\d.]+(?:, )?)*)(.*)", cell).groups()
    digits = numbers.split(", ")
    return ", ".join(like(digits[min(i, len(digits) - 1)], value) for i, value in enumerate(values)) + after


def runs(table: str, row: str) -> dict[int, dict]:
    """Return the lines of a row that was trained with fairseq, by seed."""
    return lines("evidence.jsonl").get((table, row), {})


def leads(table: str, row: str, mha: str, split: str) -> list[float]:
    """Return the bits by which a row leads plain attention, by seed."""
    plain = runs(table, mha)
    return [
        plain[seed]["losses"][split]["bits"] - run["losses"][split]["bits"] for seed, run in runs(table, row).items()
    ]


def trainings(table: str, *, every: bool = False, share_of: str = "") -> Filler:
    """Fill a table with a row for each training. Its share is that of the gain of ``share_of``; ``every`` adds rows."""

    def numbers(name: str, seed: int) -> dict[str, float]:
        run, heads = runs(table, name)[seed], name.partition("-")[0]
        found = {column: run["losses"][split]["bits"] for column, split in LOSSES.items()} | {"BLEU": run["value"]}
        if share_of:
            fit = (runs(table, f"{heads}-{one}-2e-3")[seed]["losses"]["fit"]["bits"] for one in ("mha", share_of))
            mha, measured = fit
            gain = mha - found["training loss"]
            found |= {"gain over `mha`": gain, "share": 100 * gain / (mha - measured)}
        source = lines("evidence-source-use.jsonl").get((f"{table}-source-use", name), {})
        return found | ({SHUFFLED_SOURCE: source[seed]["value"]} if seed in source else {})

    def fill(rows: list[Row], heading: str) -> list[Row]:
        groups: dict[str, list[Row]] = {}
        for row in rows:
            name = key_of(row) or name  # noqa: F821 (an empty first cell is a further seed of the row above)
            groups.setdefault(name, []).append(row)
        if every:
            groups |= {
                row: [rows[-1] | {"row": f"`{row}`"}]
                for of, row in lines("evidence.jsonl")
                if of == table and row not in groups
            }
        result = []
        for name, known in groups.items():
            by_seed = {row["seed"]: row for row in known}
            for seed in runs(table, name):
                row = by_seed.get(str(seed)) or known[-1] | {"seed": str(seed)}
                for column, value in numbers(name, seed).items():
                    if column in row:
                        digits = row[column] if re.search(r"\d", row[column]) else rows[0][column]
                        unit = " %" * (column == "share")
                        row = row | {column: like(digits.removesuffix(" %"), value) + unit}
                if SHUFFLED_SOURCE in row and SHUFFLED_SOURCE not in numbers(name, seed):
                    row = row | {SHUFFLED_SOURCE: "not kept"}
                result.append(row)
        return result

    return fill


def each(change: Callable[[Row, str], Row]) -> Filler:
    """Fill a table whose rows are given, one by one. ``change`` takes a row and its heading, and returns new cells."""
    return lambda rows, heading: [row | change(row, heading) for row in rows]


def means(row: Row, heading: str) -> Row:
    """Fill a row of the fast start: means over its seeds, and how far it is ahead under each."""
    name = key_of(row)
    found = runs("fast-start", name).values()
    new = {
        column: like(row[column], fmean(run["losses"][split]["bits"] for run in found))
        for column, split in LOSSES.items()
    }
    new |= {"seeds": str(len(found)), "BLEU": like(row["BLEU"], fmean(run["value"] for run in found))}
    mha = re.sub(r"mixhead-[ab]|gain|column-sums|small-start", "mha", name)
    if mha != name:
        ahead = "ahead of mha on the training loss, by seed"
        new[ahead] = several(row[ahead], leads("fast-start", name, mha, "fit"))
    return new


def validation_gains(row: Row, heading: str) -> Row:
    heads, rate = re.fullmatch(r"(h\d+)-.*-(\de-\d)", key_of(row)).groups()
    column = "gain on the validation set"
    return {column: several(row[column], leads("fast-start", key_of(row), f"{heads}-mha-{rate}", "valid"))}


def gains_above_the_head_size(row: Row, heading: str) -> Row:
    table, name = "above-head-size", key_of(row)
    values = leads(table, name, f"{name.split('-')[0]}-mha", "fit")
    new = {"gain on the training loss": several(row["gain on the training loss"], values)}
    if row["share"]:
        whole = leads(table, "h32-mixhead-a", "h32-mha", "fit")
        new["share"] = several(row["share"], (100 * one / most for one, most in zip(values, whole, strict=False)))
    return new


def planned(table: str, file: str) -> Filler:
    """Fill a table of planned contrasts, over the seeds that both rows have."""

    def fill(rows: list[Row], heading: str) -> list[Row]:
        named = contrasts.read_planned(PLANNED / f"{file}.json", table)
        recorded = [line for line in contrasts.load([RESULTS / "evidence.jsonl"]) if line["table"] == table]
        found = []
        for one, row in zip(named, rows, strict=True):
            seeds = range(1, int(row["seeds above 0"].split()[-1]) + 1)
            found += contrasts.compare_planned([line for line in recorded if line["seed"] in seeds], [one])
        result = []
        for row, one in zip(rows, contrasts.as_rows(found), strict=True):
            assert row["planned contrast, bits"].split()[0] == one["contrast"].split()[0]
            [corrected] = [column for column in row if "Holm" in column]
            low, high = row["95 % interval (t)"].split(" … ")
            result.append(
                row
                | {
                    "mean": like(row["mean"], one["mean"]),
                    "95 % interval (t)": f"{like(low, one['low'])} … {like(high, one['high'])}",
                    "seeds above 0": f"{one['positive']} of {one['seeds']}",
                    "t": like(row["t"], one["t"]),
                    corrected: like(row[corrected], one["t_holm"]),
                    BETTER: better_side(one["better"]),
                }
            )
        return result

    return fill


def better_side(better: str | None) -> str:
    """Return which row of a contrast is better by its interval, or which pair of rows is further apart."""
    return f"{better} by more" if better and " over " in better else f"{better or 'neither side clearly'} better"


def whole(markdown: Callable[[], str]) -> Filler:
    """Replace the rows of a table by those that a function prints."""

    def fill(rows: list[Row], heading: str) -> list[Row]:
        header, _, *found = map(cells, markdown().splitlines())
        return [dict(zip(header, row, strict=True)) for row in found]

    return fill


@functools.cache
def damping() -> list[dict[str, str]]:
    """Return a line for each layer: the sums of the weights of its mixed heads."""
    with (RESULTS / "evidence-damping.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def damped(row: Row, heading: str) -> Row:
    """Fill the median over layers of the sums of weights, by seed."""
    name, _, site = key_of(row).partition("/")
    sums = defaultdict(list)
    for layer in damping():
        if layer["row"] == name and layer["site"] in (site or layer["site"]):
            sums[layer["seed"]] += map(float, layer["sums"].split())
    column = "median by seed"
    return {column: several(row[column], map(median, sums.values()))} if row[column] else {}


def seeds_run(row: Row, heading: str) -> Row:
    name, of = re.fullmatch(r"`(.+?)`(?:, table (.+))?", row["row"]).groups()
    return {"seeds run": str(len(runs(of or "fast-start", name)))}


def searched(row: Row, heading: str) -> Row:
    name, seed, found = key_of(row), int(row["seed"]), lines("evidence-decoding.jsonl")
    columns = {"as trained": "", "decoder unmixed in the search": "-decoder-unmixed"}
    new = {
        column: like(row[column], found["fast-start-decoding", name + end][seed]["value"])
        for column, end in columns.items()
    }
    mha = runs("fast-start", f"{name.partition('-')[0]}-mha-2e-3")
    return new | {"`mha`": like(row["`mha`"], mha[seed]["value"])}


def accuracy(row: Row, heading: str) -> Row:
    new = {}
    for column, task in (("polarity", "sentence-polarity"), ("RTE", "rte")):
        run = runs(f"published-bert-all-MiniLM-L6-v2/{task}", key_of(row)).get(int(row["seed"]))
        new[column] = like(row[column], run["value"]) if run else "–"
    return new


def squared_errors(row: Row, heading: str) -> Row:
    values = [line["value"] for line in lines("evidence-nearest-point.jsonl")["nearest-point", key_of(row)].values()]
    cell = row["squared error"]
    return {"squared error": several(cell, values if ", " in cell else [fmean(values)])}


def regressed(row: Row, heading: str) -> Row:
    found = list(lines("evidence-regression.jsonl")["regression", key_of(row)].values())
    values, rank = [line["value"] for line in found], regression.rank(found[0])
    return {
        "squared error": like(row["squared error"], fmean(values)),
        "by seed": several(row["by seed"], values),
        "rank of all heads": str(rank),
        "linear attention": like(row["linear attention"], regression.linear_error(rank)),
    }


def recalled(row: Row, heading: str) -> Row:
    found, new = lines("evidence-recall.jsonl")["recall", key_of(row)], {}
    for seed, column in enumerate(list(row)[3:], 1):
        if seed in found:
            line, number = found[seed], re.match(r"(?:no: )?([\d.,]+)(.*)", row[column])
            digits, after = number.groups() if number else ("0.00", "")
            learned = line["value"] <= 0.01
            new[column] = (f"{line['updates']:,}" if learned else f"no: {like(digits, line['value'])}") + after
    return new


def matrix_errors(row: str, method: str, updates: int) -> list[float]:
    """Return the errors of known matrices over seeds, none if they were not run."""
    name = f"{row}-{method}" + ("" if updates == 800 else f"-{updates}-updates")
    return [line["value"] for line in lines("evidence-matrices.jsonl").get(("matrices", name), {}).values()]


def matrices(row: Row, heading: str) -> Row:
    """Fill geometric means over seeds. A cell with a second part in brackets has the least and the greatest seed."""
    new, updates = {}, 8_000 if heading == "8,000 updates" else 800
    for column, cell in list(row.items())[1:]:
        if values := matrix_errors(key_of(row), column, updates):
            mean, low, high = re.fullmatch(r"(\S*)(?: \((.+) to (.+)\))?", cell).groups()
            new[column] = like(mean, geometric_mean(values))
            if low:
                new[column] += f" ({like(low, min(values))} to {like(high, max(values))})"
    return new


def shares_of_fixedhead(row: Row, heading: str) -> Row:
    new = {}
    for column, cell in list(row.items())[1:]:
        if cell:
            errors = (
                matrix_errors(f"{key_of(row)}-h{column.split()[0]}", one, 800)
                for one in ("mha", "mha-more-heads", "fixedhead")
            )
            mha, more, fixed = (fmean(map(math.log, values)) for values in errors)
            new[column] = f"{100 * (mha - more) / (mha - fixed):.0f} %"
    return new


CONTRAST = ("planned contrast, bits", "mean")
DAMPED = {("row", "median by seed"): each(damped)}
TABLES: dict[str, dict[tuple[str, ...], Filler]] = {
    "above-head-size": {
        ("row", "seed", "training loss"): trainings("above-head-size"),
        ("row", "gain on the training loss"): each(gains_above_the_head_size),
        CONTRAST: planned("above-head-size", "contrasts"),
        **DAMPED,
    },
    "controls-at-mixings-rate": {
        ("row", "seed", "gain over `mha`"): trainings("fast-start", share_of="mixhead-a"),
        ("row", "seeds run"): each(seeds_run),
        ("row", "4 heads of 32", "32 heads of 4"): whole(gains.markdown),
        ("row", "seed", "as trained"): each(searched),
        CONTRAST: planned("fast-start", "contrasts_at_mixings_rate"),
        **DAMPED,
    },
    "fast-start": {
        ("rate, row", "seeds"): each(means),
        ("row", "gain on the validation set"): each(validation_gains),
        CONTRAST: planned("fast-start", "contrasts"),
        **DAMPED,
    },
    "gates": {
        ("row", "seed", "gain over `mha`"): trainings("fast-start", share_of="small-start"),
        ("row", "seeds run"): each(seeds_run),
    },
    "head-maps": {("row", "seed", "training loss"): trainings("head-maps", every=True)},
    "joined-by-ten": {
        ("row", "seed", "training loss"): trainings("joined-by-ten"),
        CONTRAST: planned("joined-by-ten", "contrasts"),
    },
    "language-model": {
        ("row", "seed", "training loss"): trainings("language-model", every=True),
        ("row", "m(T) by seed"): whole(slowdown.table),
        ("contrast", "p after Holm"): whole(slowdown.contrasts),
    },
    "matrices": {
        ("shared", "mha"): each(matrices),
        ("own", "mha"): each(matrices),
        ("", "mha", "fixedhead"): each(matrices),
        ("share, problem",): each(shares_of_fixedhead),
    },
    "measure": {
        ("model, seed", "need"): whole(lambda: measure.table(measure.read(RESULTS / "evidence-measure.jsonl")))
    },
    "nearest-point": {("row", "squared error"): each(squared_errors)},
    "published-bert": {("row", "seed", "polarity"): each(accuracy)},
    "recall": {("row", "QK", "OV"): each(recalled)},
    "regression": {("row", "squared error", "by seed"): each(regressed)},
}
"""For each page, what fills the tables that have these columns."""
