"""The pages of docs/evidence: tables and numbers are those of the recorded lines, and so are the outcomes of predictions."""

import re

import pytest

pytest.importorskip("scipy")

from experiments.controlled import TASKS
from experiments.evidence import confidence, leads, pages, predictions, slowdown
from experiments.evidence import tables as recorded_tables
from experiments.evidence.lines import ROOT

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
    "documents": (
        " | 0.258 (0.177 … 0.340) | as it says | moderate |",
        " | 0.158 (0.177 … 0.340) | the opposite | strong |",
    ),
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
