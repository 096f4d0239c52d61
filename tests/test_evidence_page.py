"""The tables of docs/evidence.md print what the recorded lines say: every cell, and no row without a line.

Lines may be there that the page does not tell of yet: they are recorded as each run ends.
"""

import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import pytest

pytest.importorskip("scipy")

from fairseq_lowrank.analysis import contrasts

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
ONE_RATE = (ROOT / "docs" / "evidence" / "controls-at-one-rate.md").read_text(encoding="utf-8")
RESULTS = ROOT / "results"


def tables(heading: str, page: str = PAGE) -> list[list[list[str]]]:
    """The tables of a section, each as rows of cells with the header first."""
    section = re.search(rf"^(##+) {re.escape(heading)}\n(.*?)(?=^##+ |\Z)", page, re.MULTILINE | re.DOTALL)[2]
    blocks = re.findall(r"(?:^ *\|.*\n)+", section, re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in block.splitlines()] for block in blocks
    ]


def table(heading: str, *columns: str, page: str = PAGE) -> list[dict[str, str]]:
    """The rows of all tables of a section that have these columns."""
    found = [one for one in tables(heading, page) if set(columns) <= set(one[0])]
    assert found, (heading, columns)
    return [dict(zip(one[0], row, strict=True)) for one in found for row in one[2:]]


def lines(file: str) -> dict[tuple[str, str], dict[int, dict]]:
    """By table and row, then by seed."""
    result = defaultdict(dict)
    for text in (RESULTS / file).read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        result[line["table"], line["row"]][line["seed"]] = line
    return result


TRAININGS, SOURCE_USE = lines("evidence.jsonl"), lines("evidence-source-use.jsonl")


def prints(cell: str, value: float) -> bool:
    """Whether a cell is the value, rounded to as many digits as it has."""
    number = float(cell.replace("−", "-"))
    mantissa, _, exponent = cell.replace("−", "-").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return math.isclose(number, value, rel_tol=0, abs_tol=0.5001 * unit)


def losses(found: dict[int, dict], seeds: Iterable[int]) -> dict[str, float]:
    chosen = [found[seed] for seed in seeds]
    names = {"fit": "fit", "validation": "valid", "test": "test"}
    means = {column: fmean(line["losses"][split]["bits"] for line in chosen) for column, split in names.items()}
    return means | {"BLEU": fmean(line["value"] for line in chosen)}


JOINED_BY_FOUR = {
    "4 heads of 32": "h4-mha",
    "32 heads of 4": "h32-mha",
    "narrow feed-forward layer, 4 heads of 32": "h4-mha-narrow",
    "mhe-mul, 4 heads of 32": "h4-mhe-mul",
    "sha, 4 heads of 32": "h4-sha",
    "mixhead-a, 4 heads of 32": "h4-mixhead-a",
    "mixhead-a, 32 heads of 4": "h32-mixhead-a",
    "fixedhead, 32 heads of 32": "h32-fixedhead",
    "wide feed-forward layer, 32 heads of 4": "h32-mha-wide",
    "fixedhead with a small start": "h32-fixedhead-small-start",
    "gain, 32 heads of 4": "h32-gain",
    "column sums, 32 heads of 4": "h32-column-sums",
    "small start, 32 heads of 4": "h32-small-start",
    "mixhead-a with a small start, 32 heads of 4": "h32-mixhead-a-small-start",
    "32 heads of 4 at 1e-3": "h32-mha-1e-3",
}
ABOVE = "Results above the head size"
WRONG_SOURCE = "bits a token that a wrong source costs"


def test_each_training_above_the_head_size_is_printed_as_recorded():
    name = ""
    for row in table(ABOVE, "row", "seed", "fit"):
        name = JOINED_BY_FOUR[row["row"]] if row["row"] else name
        key, seed = ("above-head-size", name), int(row["seed"])
        for column, value in losses(TRAININGS[key], [seed]).items():
            assert prints(row[column], value), (name, seed, column, value)
        recorded = SOURCE_USE["above-head-size-source-use", name].get(seed)
        assert row[WRONG_SOURCE] == "not kept" or prints(row[WRONG_SOURCE], recorded["value"]), (name, seed, recorded)


def fast_start_row(label: str) -> str:
    rate, *middle, method = label.split(", ")
    heads = "h32" if "32 heads of 4" in middle else "h4"
    norms = "-pre-norm" if "norms before sublayers" in middle else ""
    return f"{heads}-{method.replace(' ', '-')}{norms}-{rate}"


def test_each_row_of_the_fast_start_is_printed_as_recorded():
    for row in table("Results of the fast start", "rate, row", "fit"):
        name = fast_start_row(row["rate, row"])
        found, seeds = TRAININGS["fast-start", name], range(1, int(row["seeds"]) + 1)
        for column, value in losses(found, seeds).items():
            assert prints(row[column], value), (name, column, value)
        if row["ahead of mha on fit, a seed each"]:
            mha = re.sub(r"mixhead-[ab]|gain|column-sums|small-start", "mha", name)
            for cell, seed in zip(row["ahead of mha on fit, a seed each"].split(", "), seeds, strict=True):
                bits = [TRAININGS["fast-start", one][seed]["losses"]["fit"]["bits"] for one in (mha, name)]
                assert prints(cell, bits[0] - bits[1]), (name, seed, bits)


def test_rows_at_one_rate_have_as_many_seeds_as_lines():
    for row in table("Rows", "row", "seeds run", page=ONE_RATE):
        name, of = re.fullmatch(r"`(.+?)`(?:, table (.+))?", row["row"]).groups()
        assert int(row["seeds run"]) == len(TRAININGS.get((of or "fast-start", name), {})), name


def test_each_training_at_one_rate_is_printed_as_recorded():
    printed = table("Results", "row", "seed", "lead", page=ONE_RATE)
    for row in printed:
        name, seed = row["row"].strip("`"), int(row["seed"])
        for column, value in losses(TRAININGS["fast-start", name], [seed]).items():
            assert prints(row[column], value), (name, seed, column, value)
        heads = name.partition("-")[0]
        fit = {
            one: TRAININGS["fast-start", one][seed]["losses"]["fit"]["bits"]
            for one in (name, f"{heads}-mha-2e-3", f"{heads}-mixhead-a-2e-3")
        }
        own, mha, mixhead = fit.values()
        assert prints(row["lead"], mha - own), (name, seed, mha - own)
        assert prints(row["share"].removesuffix(" %"), 100 * (mha - own) / (mha - mixhead)), (name, seed)
    rows = table("Rows", "row", "seeds run", page=ONE_RATE)
    assert len(printed) == sum(int(row["seeds run"]) for row in rows if ", table" not in row["row"])


def test_each_search_at_one_rate_is_printed_as_recorded():
    found = lines("evidence-decoding.jsonl")
    for row in table("Results", "row", "as trained", page=ONE_RATE):
        name, seed = row["row"].strip("`"), int(row["seed"])
        for column, end in (("as trained", ""), ("decoder unmixed in the search", "-decoder-unmixed")):
            assert prints(row[column], found["fast-start-decoding", name + end][seed]["value"]), (name, seed, column)
        assert prints(row["`mha`"], TRAININGS["fast-start", f"{name.partition('-')[0]}-mha-2e-3"][seed]["value"])
    assert TRAININGS["fast-start", name][seed]["value"] == found["fast-start-decoding", name][seed]["value"]


def test_each_training_joined_by_ten_is_printed_as_recorded():
    for row in table("Results of the riddle", "row", "seed", "fit"):
        label, _, rate = row["row"].partition(" at ")
        label, seed = label.replace("norms before sublayers", "mha-pre-norm").replace(" ", "-"), int(row["seed"])
        name = f"{label}-{rate or 'paper'}"
        for column, value in losses(TRAININGS["joined-by-ten", name], [seed]).items():
            assert prints(row[column], value), (name, seed, column, value)
        if (cell := row[WRONG_SOURCE]) != "not kept":
            assert prints(cell, SOURCE_USE["joined-by-ten-source-use", name][seed]["value"]), (name, seed)


@pytest.mark.parametrize(
    ("heading", "of"),
    [
        ("Results of the fast start", "fast-start"),
        ("Results of the riddle", "joined-by-ten"),
        (ABOVE, "above-head-size"),
    ],
)
def test_named_contrasts_are_printed_as_they_come_out(heading, of):
    named = contrasts.read_named(ROOT / "examples" / "evidence" / "contrasts.json", of)
    recorded = contrasts.load([RESULTS / "evidence.jsonl"], {"table": of})
    rows = table(heading, "named contrast, bits", "mean")
    assert [row["named contrast, bits"].split()[0] for row in rows] == [one.name.split()[0] for one in named]
    outcomes = []
    for one, row in zip(named, rows, strict=True):
        seeds = range(1, int(row["seeds above 0"].split()[-1]) + 1)
        outcomes += contrasts.of_named([line for line in recorded if line["seed"] in seeds], [one])
    for row, outcome in zip(rows, contrasts.as_rows(outcomes), strict=True):
        assert prints(row["mean"], outcome["mean"]), outcome
        for cell, value in zip(row["95 % interval"].split(" … "), (outcome["low"], outcome["high"]), strict=True):
            assert prints(cell, value), outcome
        assert row["seeds above 0"] == f"{outcome['positive']} of {outcome['seeds']}"
        for cell, value in zip(list(row.values())[-2:], (outcome["t"], outcome["t_holm"]), strict=True):
            assert not cell if value is None else prints(cell, value), outcome


CONTROLS = {  # columns of the tables of effective ranks, and the labels of `spectrum --random-mixing` behind a row's name
    "without mixing": ", without mixing",
    "random M": ", random M",
    "random off-diagonal": ", random off-diagonal",
    "M shuffled": ", shuffled off-diagonal",
    "learned M": "",
}


@pytest.mark.parametrize(
    ("heading", "name"), [("Results of the fast start", "h32-mixhead-a-2e-3"), (ABOVE, "h32-mixhead-a")]
)
def test_effective_ranks_are_printed_as_recorded(heading, name):
    seed = 3  # of the one training whose table has no column for it
    for row in table(heading, "site", *CONTROLS):
        seed = int(row.get("seed") or seed)
        with (RESULTS / "evidence-spectra" / f"{name}-seed{seed}.csv").open(newline="", encoding="utf-8") as file:
            layers = [line for line in csv.DictReader(file) if line["site"] == row["site"] and not line["head"]]
        for column, control in CONTROLS.items():
            ranks = [float(line["effective_rank"]) for line in layers if line["label"] == name + control]
            assert prints(row[column], fmean(ranks)), (seed, row["site"], column, fmean(ranks))


NEAREST_POINT = {
    "mha, one head of 32": "h1-mha",
    "gain": "h8-gain",
    "sigsoftmax": "h8-sigsoftmax",
    "mixhead-a": "h8-mixhead-a",
    "mixhead-b": "h8-mixhead-b",
    "values of 32": "h8-values-32",
    "queries and keys of 32": "h8-queries-32",
    "static mixing before the softmax alone": "h8-score-mixing",
    "talking heads: before and after it": "h8-talking-heads",
}


def test_each_row_of_the_nearest_point_is_printed_as_recorded():
    found = lines("evidence-nearest-point.jsonl")
    for row in table("Results of the nearest point", "row", "squared error"):
        name = NEAREST_POINT.get(row["row"], f"h8-{row['row'].replace(' ', '-')}")
        if heads := re.fullmatch(r"(.+), (\d+) heads of \d+", row["row"]):
            name = f"h{heads[2]}-{NEAREST_POINT.get(heads[1], f'h8-{heads[1]}').removeprefix('h8-').replace(' ', '-')}"
        values = [line["value"] for _, line in sorted(found["nearest-point", name].items())]
        cells = row["squared error"].split(", ")
        if len(cells) == 1:
            assert prints(cells[0], fmean(values)), (name, values)
        else:
            assert all(prints(*pair) for pair in zip(cells, values, strict=True)), (name, values)


RECALL = {
    "mha, one head of 64": "h1-mha",
    "mha, 2 heads of 32": "h2-mha",
    "mha, 4 heads of 16": "h4-mha",
    "mha, 8 heads of 8": "h8-mha",
    "mha, 8 heads of 8, at 1e-3": "h8-mha-1e-3",
    "values of 64, 8 heads": "h8-values-64",
    "queries and keys of 64, 8 heads": "h8-queries-64",
    "mixhead-a, 8 heads of 8": "h8-mixhead-a",
    "talking heads, 8 heads of 8": "h8-talking-heads",
    "fixedhead 64, 4 heads": "h4-fixedhead",
    "fixedhead 64, 8 heads": "h8-fixedhead",
}


def test_each_run_of_recall_is_printed_as_recorded():
    found = lines("evidence-recall.jsonl")
    for row in table("Results of recall", "row", "QK", "OV"):
        name = RECALL[row["row"]]
        for seed, cell in enumerate(list(row.values())[3:], 1):
            if not cell:
                continue
            line = found["recall", name][seed]
            if cell.startswith("no: "):
                assert prints(cell[4:].split(";")[0], line["value"]), (name, seed, line["value"])
                assert line["updates"] == line["steps"]
            else:
                assert (line["updates"], line["value"] <= 0.01) == (int(cell.replace(",", "")), True), (name, seed)


MATRICES = lines("evidence-matrices.jsonl")
PARTS = {  # heading, what the page's label stands for in front of `shared` or `own`, updates
    "Results: n 16, full rank, five seeds": ("n16-", 800),
    "n 32, five seeds": ("n32-", 800),
    "8,000 updates: what can be expressed, and what is learned soon": ("n16-", 8000),
    "Positions of rank n/2": ("", 800),
}


@pytest.mark.parametrize("heading", PARTS)
def test_each_error_of_the_known_matrices_is_printed_as_recorded(heading):
    start, updates = PARTS[heading]
    checked = 0
    for header, _, *rows in tables(heading):
        methods = [name for name in header[1:] if ("matrices", f"n16-shared-h8-{name}") in MATRICES]
        for label, *cells in rows if methods else []:
            label = label.replace("n 16, ", "n16-rank8-").replace("n 32, ", "n32-rank16-").replace(", ", "-")
            *target, heads = re.fullmatch(r"(?:(.+)-)?(\d+) × \d+", label).groups()
            for method, cell in zip(methods, cells, strict=True):
                name = f"{start}{target[0] or header[0]}-h{heads}-{method}"
                values = matrices(name, updates)
                if not cell:
                    assert not values, name
                    continue
                mean = math.exp(fmean(map(math.log, values)))
                assert prints(cell.split(" (")[0], mean), (name, cell, mean)
                if spread := re.search(r"\((.+) to (.+)\)", cell):
                    assert prints(spread[1], min(values)) and prints(spread[2], max(values)), (name, values)
                checked += 1
    assert checked


def matrices(name: str, updates: int) -> list[float]:
    """The errors of a row, and of longer runs of it, over seeds."""
    found = MATRICES.get(("matrices", name if updates == 800 else f"{name}-{updates}-updates"), {})
    return [line["value"] for line in found.values()]
