"""The pages of docs/evidence: tables and numbers are those of the recorded lines, and so are the outcomes of predictions."""

import re
from statistics import fmean

import pytest

pytest.importorskip("scipy")

from experiments.controlled import TASKS
from experiments.evidence import confidence, leads, measure, pages, predictions, slowdown
from experiments.evidence import tables as recorded_tables
from experiments.evidence.lines import RESULTS, ROOT
from fairseq_lowrank.tools.reporting.statistics import equivalence_p, student

SUMMARY = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "evidence").glob("*.md"))}
DATA = {name: recorded_tables.page(name) for name in recorded_tables.SECTIONS}


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a page or section, each as rows of cells with the header first."""
    blocks = re.findall(r"(?:^ *\|.*\n)+", text, re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in block.splitlines()] for block in blocks
    ]


def table(text: str, *columns: str) -> list[dict[str, str]]:
    """The rows of all tables of a page that have these columns."""
    found = [one for one in tables(text) if set(columns) <= set(one[0])]
    assert found, columns
    return [dict(zip(one[0], row, strict=True)) for one in found for row in one[2:]]


def outcomes(experiment: str) -> dict[str, str]:
    """The outcomes of an experiment's predictions by their names."""
    groups = [group for group in predictions.groups() if group["experiment"] == experiment]
    return {one["id"]: one["outcome"] for group in groups for one in group["predictions"]}


@pytest.mark.parametrize("recipe", sorted((ROOT / "examples" / "evidence").glob("*.sh")), ids=lambda path: path.stem)
def test_an_experiment_has_one_name_in_page_table_and_recipe(recipe):
    text = recipe.read_text(encoding="utf-8")
    head = text.partition("\nsource ")[0]
    named = re.search(r"python -m experiments tables ([a-z-]+)", head)[1]
    declared = re.search(r"TABLE=(\S+)", text)
    assert named in recorded_tables.SECTIONS
    assert declared is None or named == declared[1]
    assert recipe.stem.replace("_", "-").startswith(named)


@pytest.mark.parametrize("task", TASKS)
def test_a_controlled_task_has_tables_of_its_name(task):
    assert task in recorded_tables.SECTIONS


WRONG = {  # a row of a page, and a wrong form of it
    "documents": (" | 0.258 (0.177 … 0.340) | moderate |", " | 0.158 (0.177 … 0.340) | strong |"),
    "heads": ("| OV | 2.4e-4 | 1.2e-4 | 6.9e-3 | 0.736 |", "| OV | 2.5e-4 | 9.9e-9 | 6.8e-3 | 0.700 |"),
    "language-models": (" | 2.7508 | 2.2393 | 3 | 1.37 | ", " | 2.7509 | 1.2393 | 2 | 1.07 | "),
    "measure": (" | all 32 | 32, 32 of 32 |", " | all 32 | 31 of 32 |"),
    "published-models": (" | 0.04 (−0.07 to 0.14) | ", " | 0.14 (0.07 to 0.14) | "),
    "translation": (" | 0.233 (0.187 … 0.278) | ", " | 0.233 (0.186 … 0.278) | "),
}


@pytest.mark.parametrize("page", pages.TABLES)
def test_a_number_that_is_not_as_recorded_is_replaced(page, tmp_path, monkeypatch):
    right, wrong = WRONG[page]
    assert PAGES[page].count(right) == 1
    (tmp_path / f"{page}.md").write_text(PAGES[page].replace(right, wrong), encoding="utf-8")
    monkeypatch.setattr(pages, "PAGES", tmp_path)
    assert pages.filled(page) == PAGES[page]


def test_outcomes_of_the_language_models_follow_from_their_rows():
    bits = leads.losses("language-model", "test")

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
        "L12": [("h32-score-mixing-6000", "h4-mha-6000")],
        "L13": [("h32-score-mixing", "h4-mha-6000")],
        "L19": [("h32-mha-3e-3", "h4-mha-6e-3")],
        "L21": [("h32-score-mixing-6000", "h32-mha-9600")],
    }
    factors = [fmean(m.value for m in slowdown.factors()[updates].values()) for updates in (2000, 6000)]
    assert "it is {:.2f} and then {:.2f}".format(*factors) in PAGES["language-models"]
    found = {name: text for name, text in outcomes("language-model").items() if not text.startswith("not run")}
    assert found.keys() == {*differences, "L7", "L8", "L9", "L10", "L14", "L15", "L16", "L17", "L18", "L20"}
    for name, pairs in differences.items():
        printed = re.findall(r"\d\.\d{3}", found[name])
        assert printed == [f"{fmean(by_seed(*pair)):.3f}" for pair in pairs], name
    p = equivalence_p(by_seed("h32-score-mixing-6000", "h4-mha-6000"), 0.02)
    assert found["L12"].endswith(f"p is {p:.2f}") and p > 0.05
    costs, regained = by_seed("h32-mha", "h4-mha"), by_seed("h32-mha", "h32-score-mixing")
    assert re.findall(r"\d\.\d{3}", found["L7"]) == [f"{n:.3f}" for n in (fmean(costs), *student(costs)[:2])]
    shares = [f"{100 * back / cost:.0f}" for back, cost in zip(regained, costs, strict=False)]
    assert re.findall(r"\d+(?= %)", found["L8"]) == shares
    for name, row in (("L9", "h32-score-gain-x32"), ("L10", "h32-mixhead-a")):
        assert re.findall(r"\d\.\d{3}", found[name]) == [f"{bits:.3f}" for bits in by_seed(row, "h32-mha")]
    wider = bits["h32-mha"][2] - bits["h32-qk32"][2]
    assert re.findall(r"\d+(?= %)", found["L15"]) == [f"{100 * wider / costs[1]:.0f}"]
    assert re.findall(r"\d\.\d{3}", found["L16"]) == [f"{bits['h32-mha'][2] - bits['h32-ffn1404'][2]:.3f}"]
    ahead = [bits["h4-mha"][2] - bits[row][2] for row in ("h4-qk128", "h4-score-mixing")]
    assert re.findall(r"\d\.\d{3}", found["L17"]) == [f"{lead:.3f}" for lead in ahead]
    (cut,) = (line for line in measure.read(RESULTS / "evidence-measure.jsonl") if "score-mixing-2000" in line["model"])
    assert re.findall(r"\d\.\d{3}", found["L14"]) == [f"{measure.loss_at(cut, 4):.3f}"]


def test_outcomes_of_head_maps_follow_from_their_rows():
    bits, found = leads.losses("head-maps", "test"), outcomes("head-maps")

    def ahead(row, other="mha"):
        others = bits[f"{row.partition('-')[0]}-{other}"]
        return [others[seed] - value for seed, value in bits[row].items()]

    rows = {
        "H1": ["h4-headmix", "h32-headmix"],
        "H2": ["h4-headmix-x4"],
        "H3": ["h32-headmix-x32"],
        "H4": ["h4-gain-x4", "h32-gain-x32"],
        "H5": ["h4-mha-values-x4", "h32-mha-values-x32"],
    }
    for name, names in rows.items():
        means = [fmean(ahead(row)) for row in names]
        assert re.findall(r"\d\.\d{3}", found[name]) == [f"{abs(mean):.3f}" for mean in means], name
        assert all(("ahead" if mean > 0 else "behind") in found[name] for mean in means), name
    costs = [bits["h32-mha"][seed] - bits["h4-mha"][seed] for seed in bits["h4-mha"]]
    assert re.findall(r"\d\.\d{3}", found["H6"]) == [f"{fmean(costs):.3f}"]
    (group,) = (group for group in predictions.groups() if group["experiment"] == "head-maps")
    (rule,) = re.findall(r"^\*\*Outcome:\*\* .*", group["remarks"], re.MULTILINE)
    intervals = [student(ahead("h32-headmix", other))[:2] for other in ("mha", "gain-x32", "mha-values-x32")]
    assert re.findall(r"\((.+?) … (.+?)\)", rule) == [(f"{low:.3f}", f"{high:.3f}") for low, high in intervals]


NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?:e[-−]?\d+)?(?!\w)")


def numbers(page: str) -> set[str]:
    """The numbers of a page, without those in headings, comments and targets of links."""
    text = re.sub(r"\[[^\]]*\]\(https?:[^)]*\)|\]\([^)]*\)|<!--.*?-->|^#.*$", "", page, flags=re.MULTILINE)
    return set(NUMBER.findall(text))


def digits_of(number: str) -> int:
    return len(re.split("e", number)[0].partition(".")[2])


def rounded(number: str, digits: int) -> str:
    mantissa, e, exponent = number.replace(",", "").replace("−", "-").partition("e")
    return f"{float(mantissa):.{digits}f}{e}{exponent}"


def test_every_measured_number_of_a_page_comes_from_the_data():
    known = set().union(*map(numbers, DATA.values()))
    recorded = {rounded(number, digits) for number in known for digits in range(1, digits_of(number) + 1)}
    written = {"summary": SUMMARY, "bottleneck": (ROOT / "docs" / "bottleneck.md").read_text(encoding="utf-8"), **PAGES}
    for page, text in written.items():
        measured = {number for number in numbers(text) if "." in number}
        assert {number for number in measured if rounded(number, digits_of(number)) not in recorded} == set(), page


def test_n_gram_models_are_those_of_the_page():
    (row,) = (row for row in table(DATA["language-model"], "order", "3") if row["order"].endswith("test"))
    assert {order: float(row[str(order)]) for order in leads.NGRAMS} == leads.NGRAMS


def test_labels_of_confidence_are_computed():
    (questions,) = (one for one in tables(SUMMARY) if one[0] == ["question", "answer", "confidence"])
    printed = {re.match(r"\[(\d)", row[0])[1]: row[2] for row in questions[2:]}
    found = confidence.answers()
    assert printed == {
        "1": found["1"],
        "2": f"{found['2, before the softmax']} before, {found['2, after the softmax']} after",
        "3": found["3"],
        "4": f"{found['4, 4 heads']} with 4 heads, {found['4, 32 heads']} with 32",
        "5": found["5"],
        "6": f"{found['6, decoding']} with 4 heads; {found['6, ten sentences']}",
        "7": "–",
    }


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({"one": [1.0, 1.1, 1.2], "two": [0.5, 0.6, 0.7]}, "strong"),
        ({"one": [1.0, 1.1, 1.2]}, "moderate"),
        ({"one": [1.0, 1.1, 1.2], "two": [-1.0, 1.0, 2.0]}, "moderate"),
        ({"one": [1.0, 1.1], "two": [0.5, 0.6]}, "weak"),
        ({"one": [-1.0, 1.0, 2.0]}, "weak"),
    ],
)
def test_confidence_needs_seeds_settings_and_an_interval(settings, label):
    assert confidence.label(settings) == label


def test_slow_down_is_interpolated_in_the_logarithm_of_updates():
    losses = {1000: 3.0, 4000: 2.0}  # half a bit for twice the updates
    assert slowdown.factor(losses, 2.5, 1000) == (pytest.approx(2.0), False)
    assert slowdown.factor(losses, 1.5, 4000) == (pytest.approx(2.0), True)
    assert slowdown.factor({1000: 3.0}, 2.5, 1000) is None


@pytest.mark.parametrize("page", [name for name, text in DATA.items() if "| better, by the interval |" in text])
def test_no_prediction_is_decided_by_an_interval_that_includes_zero(page):
    contrasts = {row["contrast"].split()[0]: row for row in table(DATA[page], "contrast", "better, by the interval")}
    undecided = [name for name, row in contrasts.items() if row["better, by the interval"].startswith("neither")]
    found = {
        name: text
        for group in {one["experiment"] for one in predictions.groups()}
        for name, text in outcomes(group).items()
    }
    assert contrasts.keys() <= found.keys()
    assert not [name for name in undecided if not found[name].startswith("unclear")]
