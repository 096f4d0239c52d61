"""The tables of docs/evidence/ print what the recorded lines say: every cell, and no row without a line.

A row of the page names its recorded row in a comment, such as ``<!-- h4-mha -->``, so its label is free text.
Lines may be there that the page does not tell of yet: they are recorded as each run ends.
"""

import csv
import gzip
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median

import pytest

pytest.importorskip("scipy")

from experiments.controlled import TASKS, regression
from experiments.controlled.runs import geometric_mean
from experiments.evidence import gains, measure
from fairseq_lowrank.tools.reporting import contrasts
from fairseq_lowrank.tools.reporting.statistics import student

ROOT = Path(__file__).resolve().parent.parent
SUMMARY = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "evidence").glob("*.md"))}
RESULTS = ROOT / "results"


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a page or section, each as rows of cells with the header first."""
    blocks = re.findall(r"(?:^ *\|.*\n)+", text, re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in block.splitlines()] for block in blocks
    ]


def table(page: str, *columns: str) -> list[dict[str, str]]:
    """The rows of all tables of a page that have these columns."""
    found = [one for one in tables(PAGES[page]) if set(columns) <= set(one[0])]
    assert found, (page, columns)
    return [dict(zip(one[0], row, strict=True)) for one in found for row in one[2:]]


def lines(file: str) -> dict[tuple[str, str], dict[int, dict]]:
    """By table and row, then by seed."""
    result = defaultdict(dict)
    for text in (RESULTS / file).read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        result[line["table"], line["row"]][line["seed"]] = line
    return result


def key_of(row: dict[str, str]) -> str | None:
    """Return the recorded row that a row of the page names in its first cell."""
    named = re.search(r"<!-- (\S+) -->", next(iter(row.values())))
    return named and named[1]


TRAININGS, SOURCE_USE = lines("evidence.jsonl"), lines("evidence-source-use.jsonl")


def name_of(title: str) -> str:
    """Return an experiment's name as files have it: "Above the head size: …" is above-head-size."""
    words = re.sub(r"\b(the|a) ", "", title.partition(":")[0].lower()).replace("'", "")
    return "-".join(re.findall(r"[a-z0-9]+", words))


@pytest.mark.parametrize("page", PAGES)
def test_an_experiment_has_one_name_in_file_and_title(page):
    title = PAGES[page].partition("\n")[0].removeprefix("# ")
    assert page in name_of(title)


@pytest.mark.parametrize("recipe", sorted((ROOT / "examples" / "evidence").glob("*.sh")), ids=lambda path: path.stem)
def test_an_experiment_has_one_name_in_page_table_and_recipe(recipe):
    text = recipe.read_text(encoding="utf-8")
    named = name_of(re.search(r"^# Evidence, ([^:]+):", text, re.MULTILINE)[1])
    declared = re.search(r"TABLE=(\S+)", text)
    assert named in PAGES
    assert declared is None or named == declared[1]
    assert recipe.stem.replace("_", "-").startswith(named)


@pytest.mark.parametrize("task", TASKS)
def test_a_controlled_task_has_a_page_of_its_name(task):
    assert task in PAGES


def prints(cell: str, value: float) -> bool:
    """Whether a cell is the value, rounded to as many digits as it has."""
    number = float(cell.replace("−", "-"))
    mantissa, _, exponent = cell.replace("−", "-").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return math.isclose(number, value, rel_tol=0, abs_tol=0.5001 * unit)


def losses(found: dict[int, dict], seeds: Iterable[int]) -> dict[str, float]:
    chosen = [found[seed] for seed in seeds]
    names = {"training loss": "fit", "validation": "valid", "test": "test"}
    means = {column: fmean(line["losses"][split]["bits"] for line in chosen) for column, split in names.items()}
    return means | {"BLEU": fmean(line["value"] for line in chosen)}


SHUFFLED_SOURCE = "bits per token that a shuffled source costs"


def test_each_training_above_the_head_size_is_printed_as_recorded():
    name = ""
    for row in table("above-head-size", "row", "seed", "training loss"):
        name = key_of(row) or name
        key, seed = ("above-head-size", name), int(row["seed"])
        for column, value in losses(TRAININGS[key], [seed]).items():
            assert prints(row[column], value), (name, seed, column, value)
        recorded = SOURCE_USE["above-head-size-source-use", name].get(seed)
        assert row[SHUFFLED_SOURCE] == "not kept" or prints(row[SHUFFLED_SOURCE], recorded["value"]), (
            name,
            seed,
            recorded,
        )


def test_each_row_of_the_fast_start_is_printed_as_recorded():
    for row in table("fast-start", "rate, row", "training loss"):
        name = key_of(row)
        found, seeds = TRAININGS["fast-start", name], range(1, int(row["seeds"]) + 1)
        for column, value in losses(found, seeds).items():
            assert prints(row[column], value), (name, column, value)
        if row["ahead of mha on the training loss, by seed"]:
            mha = re.sub(r"mixhead-[ab]|gain|column-sums|small-start", "mha", name)
            for cell, seed in zip(row["ahead of mha on the training loss, by seed"].split(", "), seeds, strict=True):
                bits = [TRAININGS["fast-start", one][seed]["losses"]["fit"]["bits"] for one in (mha, name)]
                assert prints(cell, bits[0] - bits[1]), (name, seed, bits)


def leads(of: str, name: str, mha: str, split: str) -> list[float]:
    """The bits by which a row leads mha, by seed from 1 on."""
    rows = TRAININGS[of, name], TRAININGS[of, mha]
    mine, others = ([row[seed]["losses"][split]["bits"] for seed in sorted(rows[0])] for row in rows)
    return [other - one for one, other in zip(mine, others, strict=True)]


def test_leads_on_the_validation_set_are_printed_as_recorded():
    for row in table("fast-start", "gain on the validation set"):
        heads, rate = re.fullmatch(r"(h\d+)-.*-(\de-\d)", key_of(row)).groups()
        values = leads("fast-start", key_of(row), f"{heads}-mha-{rate}", "valid")
        for cell, value in zip(row["gain on the validation set"].split(", "), values, strict=True):
            assert prints(cell, value), (row, values)


def test_leads_above_the_head_size_are_printed_as_recorded():
    of = "above-head-size"
    mixed = leads(of, "h32-mixhead-a", "h32-mha", "fit")
    for row in table(of, "gain on the training loss"):
        values = leads(of, key_of(row), f"{key_of(row).split('-')[0]}-mha", "fit")
        for cell, value in zip(row["gain on the training loss"].split(", "), values, strict=True):
            assert prints(cell, value), (row, values)
        if row["share"]:
            for cell, value, whole in zip(row["share"][:-2].split(", "), values, mixed, strict=True):
                assert prints(cell, 100 * value / whole), (row, values)


with (RESULTS / "evidence-damping.csv").open(encoding="utf-8", newline="") as file:
    DAMPING = list(csv.DictReader(file))
"""A line for each layer: the sums of the weights of its mixed heads."""


@pytest.mark.parametrize("page", ["fast-start", "above-head-size", "controls-at-mixings-rate"])
def test_medians_of_damping_are_printed_as_recorded(page):
    for row in table(page, "median by seed"):
        name, _, site = key_of(row).partition("/")
        for seed, cell in enumerate(filter(None, row["median by seed"].split(" (")[0].split(", ")), 1):
            layers = [layer for layer in DAMPING if (layer["row"], layer["seed"]) == (name, str(seed))]
            sums = [float(x) for layer in layers if site in ("", layer["site"]) for x in layer["sums"].split()]
            assert prints(cell, median(sums)), (name, seed, median(sums))


@pytest.mark.parametrize("page", ["controls-at-mixings-rate", "gates"])
def test_rows_at_mixings_rate_have_as_many_seeds_as_lines(page):
    for row in table(page, "row", "seeds run"):
        name, of = re.fullmatch(r"`(.+?)`(?:, table (.+))?", row["row"]).groups()
        assert int(row["seeds run"]) == len(TRAININGS.get((of or "fast-start", name), {})), name


@pytest.mark.parametrize(("page", "measure"), [("controls-at-mixings-rate", "mixhead-a"), ("gates", "small-start")])
def test_each_training_at_mixings_rate_is_printed_as_recorded(page, measure):
    printed = table(page, "row", "seed", "gain over `mha`")
    for row in printed:
        name, seed = row["row"].strip("`"), int(row["seed"])
        for column, value in losses(TRAININGS["fast-start", name], [seed]).items():
            assert prints(row[column], value), (name, seed, column, value)
        heads = name.partition("-")[0]
        fit = {
            one: TRAININGS["fast-start", one][seed]["losses"]["fit"]["bits"]
            for one in (name, f"{heads}-mha-2e-3", f"{heads}-{measure}-2e-3")
        }
        own, mha, measured = fit.values()
        assert prints(row["gain over `mha`"], mha - own), (name, seed, mha - own)
        assert prints(row["share"].removesuffix(" %"), 100 * (mha - own) / (mha - measured)), (name, seed)
    rows = table(page, "row", "seeds run")
    assert len(printed) == sum(int(row["seeds run"]) for row in rows if ", table" not in row["row"])


def test_each_accuracy_of_the_published_bert_is_printed_as_recorded():
    found = {}
    for text in (RESULTS / "evidence.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["table"].startswith("published-bert"):
            found[line["row"], line["seed"], line["task"]] = line["value"]
    printed = {}
    for row in table("published-bert", "row", "seed", "polarity", "RTE"):
        for column, task in (("polarity", "sentence-polarity"), ("RTE", "rte")):
            if row[column] != "–":
                printed[row["row"].strip("`"), int(row["seed"]), task] = row[column]
    assert found.keys() == printed.keys()
    for key, cell in printed.items():
        assert prints(cell, found[key]), key


def test_each_loss_of_the_language_models_is_printed_as_recorded():
    printed = set()
    for row in table("language-model", "row", "seed", "test"):
        name, seed = row["row"].strip("`"), int(row["seed"])
        for column, split in (("training loss", "fit"), ("validation", "valid"), ("test", "test")):
            assert prints(row[column], TRAININGS["language-model", name][seed]["losses"][split]["bits"]), (name, seed)
        printed.add((name, seed))
    assert printed == {
        (row, seed) for (of, row), found in TRAININGS.items() if of == "language-model" for seed in found
    }


def test_outcomes_of_the_language_models_follow_from_their_rows():
    bits = {
        row: {seed: found[seed]["losses"]["test"]["bits"] for seed in found}
        for (of, row), found in TRAININGS.items()
        if of == "language-model"
    }

    def by_seed(worse, better):
        return [bits[worse][seed] - bits[better][seed] for seed in sorted(bits[worse].keys() & bits[better].keys())]

    differences = {
        "L1": [("h32-mha", "h4-mha")],
        "L2": [("h32-mixhead-a", "h32-mha"), ("h32-mixhead-a", "h32-gain-x8")],
        "L3": [("h32-mha", "h32-small-start")],
        "L4": [("h32-mha", "h32-score-mixing")],
        "L5": [("h32-mixhead-a", "h32-mha-equal-time")],
        "L6": [("h4-mixhead-a", "h4-mha")],
        "L11": [("h32-mha-6000", "h4-mha-6000")],
        "L13": [("h32-score-mixing", "h4-mha-6000")],
    }
    outcomes = {row[""]: row["outcome"] for row in table("language-model", "prediction", "outcome")}
    outcomes = {name: outcome for name, outcome in outcomes.items() if outcome != "not run"}
    assert outcomes.keys() == {*differences, "L7", "L8", "L10", "L14", "L15", "L16", "L17"}
    for name, pairs in differences.items():
        printed = re.findall(r"\d\.\d{3}", outcomes[name])
        assert printed == [f"{fmean(by_seed(*pair)):.3f}" for pair in pairs], name
    for row in ("h4-mha", "h32-mha", "h32-score-mixing"):
        assert f"{fmean(bits[row].values()):.4f}" in PAGES["language-model"]
    costs, regained = by_seed("h32-mha", "h4-mha"), by_seed("h32-mha", "h32-score-mixing")
    assert re.findall(r"\d\.\d{3}", outcomes["L7"]) == [f"{n:.3f}" for n in (fmean(costs), *student(costs)[:2])]
    shares = [f"{100 * back / cost:.0f}" for back, cost in zip(regained, costs, strict=False)]
    assert re.findall(r"\d+(?= %)", outcomes["L8"]) == shares
    behind = by_seed("h32-mixhead-a", "h32-mha")
    assert re.findall(r"\d\.\d{3}", outcomes["L10"]) == [f"{bits:.3f}" for bits in behind]
    wider = bits["h32-mha"][2] - bits["h32-qk32"][2]
    assert re.findall(r"\d+(?= %)", outcomes["L15"]) == [f"{100 * wider / costs[1]:.0f}"]
    assert re.findall(r"\d\.\d{3}", outcomes["L16"]) == [f"{bits['h32-mha'][2] - bits['h32-ffn1404'][2]:.3f}"]
    ahead = [bits["h4-mha"][2] - bits[row][2] for row in ("h4-qk128", "h4-score-mixing")]
    assert re.findall(r"\d\.\d{3}", outcomes["L17"]) == [f"{lead:.3f}" for lead in ahead]
    (cut,) = (line for line in measure.read(RESULTS / "evidence-measure.jsonl") if "score-mixing-2000" in line["model"])
    assert re.findall(r"\d\.\d{3}", outcomes["L14"]) == [f"{cut['value'] * dict(cut['ranks'])[4]:.3f}"]


def test_each_search_at_mixings_rate_is_printed_as_recorded():
    found = lines("evidence-decoding.jsonl")
    for row in table("controls-at-mixings-rate", "row", "as trained"):
        name, seed = row["row"].strip("`"), int(row["seed"])
        for column, end in (("as trained", ""), ("decoder unmixed in the search", "-decoder-unmixed")):
            assert prints(row[column], found["fast-start-decoding", name + end][seed]["value"]), (name, seed, column)
        assert prints(row["`mha`"], TRAININGS["fast-start", f"{name.partition('-')[0]}-mha-2e-3"][seed]["value"])
    assert TRAININGS["fast-start", name][seed]["value"] == found["fast-start-decoding", name][seed]["value"]


def test_each_training_joined_by_ten_is_printed_as_recorded():
    for row in table("joined-by-ten", "row", "seed", "training loss"):
        name, seed = key_of(row), int(row["seed"])
        for column, value in losses(TRAININGS["joined-by-ten", name], [seed]).items():
            assert prints(row[column], value), (name, seed, column, value)
        if (cell := row[SHUFFLED_SOURCE]) != "not kept":
            assert prints(cell, SOURCE_USE["joined-by-ten-source-use", name][seed]["value"]), (name, seed)


@pytest.mark.parametrize(
    ("of", "planned", "page"),
    [(of, "contrasts", of) for of in ("fast-start", "joined-by-ten", "above-head-size")]
    + [("fast-start", "contrasts_at_mixings_rate", "controls-at-mixings-rate")],
)
def test_named_contrasts_are_printed_as_they_come_out(of, planned, page):
    named = contrasts.read_planned(ROOT / "examples" / "evidence" / f"{planned}.json", of)
    recorded = [line for line in contrasts.load([RESULTS / "evidence.jsonl"]) if line["table"] == of]
    rows = table(page, "planned contrast, bits", "mean")
    assert [row["planned contrast, bits"].split()[0] for row in rows] == [one.name.split()[0] for one in named]
    outcomes = []
    for one, row in zip(named, rows, strict=True):
        seeds = range(1, int(row["seeds above 0"].split()[-1]) + 1)
        outcomes += contrasts.compare_planned([line for line in recorded if line["seed"] in seeds], [one])
    for row, outcome in zip(rows, contrasts.as_rows(outcomes), strict=True):
        assert prints(row["mean"], outcome["mean"]), outcome
        for cell, value in zip(row["95 % interval (t)"].split(" … "), (outcome["low"], outcome["high"]), strict=True):
            assert prints(cell, value), outcome
        assert row["seeds above 0"] == f"{outcome['positive']} of {outcome['seeds']}"
        assert prints(row["t"], outcome["t"]), outcome
        [corrected] = [cell for column, cell in row.items() if "Holm" in column]
        assert prints(corrected, outcome["t_holm"]), outcome
        assert row["outcome by the interval alone"].split("; ")[0] == outcome["outcome"]


CONTROLS = {  # what a page compares learned mixing with, and the labels of `spectrum --random-mixing` behind a row's name
    "no mixing": ", without mixing",
    "a random M equally far from I": ", random M",
    "random entries off its diagonal": ", random off-diagonal",
    "its entries off the diagonal shuffled": ", shuffled off-diagonal",
}


@pytest.mark.parametrize(
    ("page", "name", "seeds"),
    [("fast-start", "h32-mixhead-a-2e-3", [3]), ("above-head-size", "h32-mixhead-a", [1, 2, 3])],
)
def test_effective_ranks_are_printed_as_recorded(page, name, seeds):
    ratios = defaultdict(list)
    for seed in seeds:
        with gzip.open(
            RESULTS / "evidence-spectra" / f"{name}-seed{seed}.csv.gz", "rt", newline="", encoding="utf-8"
        ) as file:
            layers = [line for line in csv.DictReader(file) if not line["head"]]
        for site in ("encoder", "decoder", "cross"):
            ranks = {
                control: fmean(
                    float(line["effective_rank"])
                    for line in layers
                    if (line["label"], line["site"]) == (name + control, site)
                )
                for control in ("", *CONTROLS.values())
            }
            for control in CONTROLS.values():
                ratios[control, site].append(100 * (ranks[""] / ranks[control] - 1))
    for words, control in CONTROLS.items():
        spans = {
            site: " to ".join(dict.fromkeys(f"{value:.1f}".replace("-", "−") for value in (min(found), max(found))))
            for (of, site), found in ratios.items()
            if of == control
        }
        assert f"- {words}: " + ", ".join(f"{span} % ({site})" for site, span in spans.items()) in PAGES[page]


def test_each_row_of_the_nearest_point_is_printed_as_recorded():
    found = lines("evidence-nearest-point.jsonl")
    for row in table("nearest-point", "row", "squared error"):
        name = key_of(row)
        values = [line["value"] for _, line in sorted(found["nearest-point", name].items())]
        cells = row["squared error"].split(", ")
        if len(cells) == 1:
            assert prints(cells[0], fmean(values)), (name, values)
        else:
            assert all(prints(*pair) for pair in zip(cells, values, strict=True)), (name, values)


def test_each_row_of_the_regression_is_printed_as_recorded():
    found = lines("evidence-regression.jsonl")
    for row in table("regression", "row", "squared error", "by seed"):
        chosen = [line for _, line in sorted(found["regression", key_of(row)].items())]
        values = [line["value"] for line in chosen]
        assert prints(row["squared error"], fmean(values)), (row, values)
        assert all(prints(*pair) for pair in zip(row["by seed"].split(", "), values, strict=True)), (row, values)
        rank = regression.rank(chosen[0])
        assert (row["rank of all heads"], row["linear attention"]) == (
            str(rank),
            f"{regression.linear_error(rank):.3f}",
        )


def test_each_run_of_recall_is_printed_as_recorded():
    found = lines("evidence-recall.jsonl")
    for row in table("recall", "row", "QK", "OV"):
        name = key_of(row)
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
PARTS = {  # heading and updates
    "n 16, full rank, five seeds": 800,
    "n 32, five seeds": 800,
    "8,000 updates": 8000,
    "Positions of rank n/2": 800,
    "Errors of the later methods": 800,
}


@pytest.mark.parametrize("heading", PARTS)
def test_each_error_of_the_known_matrices_is_printed_as_recorded(heading):
    updates = PARTS[heading]
    checked = 0
    page = PAGES["matrices"]
    section = re.search(rf"^### {re.escape(heading)}\n(.*?)(?=^##+ |\Z)", page, re.MULTILINE | re.DOTALL)[1]
    for header, _, *rows in tables(section):
        methods = [name for name in header[1:] if ("matrices", f"n16-shared-h8-{name}") in MATRICES]
        for label, *cells in rows if methods else []:
            row = key_of({header[0]: label})
            for method, cell in zip(methods, cells, strict=True):
                name = f"{row}-{method}"
                values = matrices(name, updates)
                if not cell:
                    assert not values, name
                    continue
                mean = geometric_mean(values)
                assert prints(cell.split(" (")[0], mean), (name, cell, mean)
                if spread := re.search(r"\((.+) to (.+)\)", cell):
                    assert prints(spread[1], min(values)) and prints(spread[2], max(values)), (name, values)
                checked += 1
    assert checked


def matrices(name: str, updates: int) -> list[float]:
    """The errors of a row, and of longer runs of it, over seeds."""
    found = MATRICES.get(("matrices", name if updates == 800 else f"{name}-{updates}-updates"), {})
    return [line["value"] for line in found.values()]


def test_shares_of_the_lead_of_fixedhead_are_printed_as_recorded():
    for row in table("matrices", "share, problem"):
        for column, cell in list(row.items())[1:]:
            if cell:
                label = f"{key_of(row)}-h{column.split()[0]}"
                methods = (f"{label}-{one}" for one in ("mha", "mha-more-heads", "fixedhead"))
                mha, more, fixed = (fmean(map(math.log, matrices(one, 800))) for one in methods)
                assert prints(cell.removesuffix(" %"), 100 * (mha - more) / (mha - fixed)), (label, cell)


OUTCOMES = (
    "held",
    "contradicted",
    "unclear",
    "not run",
    "as predicted under one seed",
    "against the prediction under one seed",
)
OF_ONE_SEED = re.compile(r"held \((?:one|1) seed")
NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?!\w)")


def numbers(page: str) -> set[str]:
    """The numbers of a page, without those in headings and in targets of links."""
    text = re.sub(r"\]\([^)]*\)|^#.*$", "", page, flags=re.MULTILINE)
    return set(NUMBER.findall(text))


def test_gains_at_mixings_rate_are_printed_as_recorded():
    assert gains.markdown() in PAGES["controls-at-mixings-rate"]


def test_n_gram_models_of_the_picture_are_those_of_the_page():
    for row in table("language-model", "order", "3"):
        if row["order"].endswith("test"):
            assert {int(order): float(row[order]) for order in ("3", "4")} == gains.NGRAMS
            return
    raise AssertionError("no row of n-gram models")


def test_every_number_of_the_summary_is_on_another_page():
    assert not numbers(SUMMARY) - set().union(*map(numbers, PAGES.values()))


def test_summary_is_short():
    assert len(SUMMARY.splitlines()) <= 120


@pytest.mark.parametrize("page", sorted(PAGES))
def test_each_prediction_has_an_outcome(page):
    predicted = [one for one in tables(PAGES[page]) if "contradicted by" in one[0]]
    assert predicted or page == "method"
    for header, _, *rows in predicted:
        assert header[-1] == "outcome"
        assert not [row for row in rows if not row[-1].startswith(OUTCOMES)]
        assert not [row for row in rows if OF_ONE_SEED.search(row[-1])]


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if " outcome |" in text and name != "method"])
def test_outcomes_are_defined_where_they_are_used(page):
    assert "](method.md#predictions-and-outcomes)" in PAGES[page]
