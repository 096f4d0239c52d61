"""The pages of docs/evidence: a wrong number in a table is mended, and outcomes follow from the recorded lines."""

import csv
import gzip
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import pytest

pytest.importorskip("scipy")

from experiments.controlled import TASKS
from experiments.evidence import confidence, gains, measure, pages, slowdown
from fairseq_lowrank.tools.reporting.statistics import equivalence_p, student

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


WRONG = {  # a row of a page, and a wrong form of it that keeps the number of digits
    "language-model": ("| `h4-mha` | 1 | 2.5733 | 2.5345 | 2.5757 |", "| `h4-mha` | 1 | 2.5745 | 9.9999 | 1.0000 |"),
    "above-head-size": (
        "| | 2 | 3.536 | 3.885 | 3.810 | 26.8 | 3.15 |",
        "| | 2 | 3.536 | 3.885 | 3.810 | 26.9 | 3.14 |",
    ),
    "fast-start": (" | 0.046, 0.045, 0.047 |", " | 0.046, 0.045, 0.046 |"),
    "joined-by-ten": (" −0.005 | −0.0093 … −0.0002 | 0 of 2 | ", " 0.005 | −0.0093 … 0.0002 | 0 of 2 | "),
    "controls-at-mixings-rate": (" | 0.233 (0.187 … 0.278) | ", " | 0.233 (0.186 … 0.278) | "),
    "matrices": (" 8.9e-3 (5e-3 to 6e-2) |", " 8.8e-3 (5e-3 to 7e-2) |"),
    "recall": (" | 2,000 | no: 0.03; below 0.1", " | 2,100 | no: 0.04; below 0.1"),
    "regression": (" 16 | 0.345 | 0.346, 0.352, 0.338 |", " 15 | 0.344 | 0.346, 0.352 |"),
}


@pytest.mark.parametrize("page", WRONG)
def test_a_number_that_is_not_as_recorded_is_mended(page, tmp_path, monkeypatch):
    right, wrong = WRONG[page]
    assert PAGES[page].count(right) == 1
    (tmp_path / f"{page}.md").write_text(PAGES[page].replace(right, wrong), encoding="utf-8")
    monkeypatch.setattr(pages, "PAGES", tmp_path)
    assert pages.filled(page) == PAGES[page]


@pytest.mark.parametrize("page", ["language-model", "gates", "joined-by-ten"])
def test_a_new_seed_gets_its_row(page, tmp_path, monkeypatch):
    lines = PAGES[page].splitlines()
    fewer = [line for line in lines if not re.match(r"\| [^|]+ \| [23] \| \d\.\d+ \|", line)]
    assert len(fewer) < len(lines) - 1
    (tmp_path / f"{page}.md").write_text("\n".join(fewer) + "\n", encoding="utf-8")
    monkeypatch.setattr(pages, "PAGES", tmp_path)
    assert set(pages.filled(page).splitlines()) == set(lines)


@pytest.mark.parametrize("task", TASKS)
def test_a_controlled_task_has_a_page_of_its_name(task):
    assert task in PAGES


def test_outcomes_of_the_language_models_follow_from_their_rows():
    bits = gains.losses("language-model", "test")

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
    }
    outcomes = {row[""]: row["outcome"] for row in table("language-model", "prediction", "outcome")}
    outcomes = {name: outcome for name, outcome in outcomes.items() if not outcome.startswith("not run")}
    assert outcomes.keys() == {*differences, "L7", "L8", "L9", "L10", "L14", "L15", "L16", "L17"}
    for name, pairs in differences.items():
        printed = re.findall(r"\d\.\d{3}", outcomes[name])
        assert printed == [f"{fmean(by_seed(*pair)):.3f}" for pair in pairs], name
    p = equivalence_p(by_seed("h32-score-mixing-6000", "h4-mha-6000"), 0.02)
    assert outcomes["L12"].endswith(f"p is {p:.2f}") and p > 0.05
    for row in ("h4-mha", "h32-mha", "h32-score-mixing"):
        assert f"{fmean(bits[row].values()):.4f}" in PAGES["language-model"]
    costs, regained = by_seed("h32-mha", "h4-mha"), by_seed("h32-mha", "h32-score-mixing")
    assert re.findall(r"\d\.\d{3}", outcomes["L7"]) == [f"{n:.3f}" for n in (fmean(costs), *student(costs)[:2])]
    shares = [f"{100 * back / cost:.0f}" for back, cost in zip(regained, costs, strict=False)]
    assert re.findall(r"\d+(?= %)", outcomes["L8"]) == shares
    for name, row in (("L9", "h32-score-gain-x32"), ("L10", "h32-mixhead-a")):
        assert re.findall(r"\d\.\d{3}", outcomes[name]) == [f"{bits:.3f}" for bits in by_seed(row, "h32-mha")]
    wider = bits["h32-mha"][2] - bits["h32-qk32"][2]
    assert re.findall(r"\d+(?= %)", outcomes["L15"]) == [f"{100 * wider / costs[1]:.0f}"]
    assert re.findall(r"\d\.\d{3}", outcomes["L16"]) == [f"{bits['h32-mha'][2] - bits['h32-ffn1404'][2]:.3f}"]
    ahead = [bits["h4-mha"][2] - bits[row][2] for row in ("h4-qk128", "h4-score-mixing")]
    assert re.findall(r"\d\.\d{3}", outcomes["L17"]) == [f"{lead:.3f}" for lead in ahead]
    (cut,) = (line for line in measure.read(RESULTS / "evidence-measure.jsonl") if "score-mixing-2000" in line["model"])
    assert re.findall(r"\d\.\d{3}", outcomes["L14"]) == [f"{cut['value'] * dict(cut['ranks'])[4]:.3f}"]


def test_outcomes_of_head_maps_follow_from_their_rows():
    bits, page = gains.losses("head-maps", "test"), PAGES["head-maps"]

    def leads(row, other="mha"):
        others = bits[f"{row.partition('-')[0]}-{other}"]
        return [others[seed] - value for seed, value in bits[row].items()]

    outcomes = {row[""]: row["outcome"] for row in table("head-maps", "prediction", "outcome")}
    rows = {
        "H1": ["h4-headmix", "h32-headmix"],
        "H2": ["h4-headmix-x4"],
        "H3": ["h32-headmix-x32"],
        "H4": ["h4-gain-x4", "h32-gain-x32"],
        "H5": ["h4-mha-values-x4", "h32-mha-values-x32"],
    }
    for name, names in rows.items():
        means = [fmean(leads(row)) for row in names]
        assert re.findall(r"\d\.\d{3}", outcomes[name]) == [f"{abs(mean):.3f}" for mean in means], name
        assert all(("ahead" if mean > 0 else "behind") in outcomes[name] for mean in means), name
    costs = [bits["h32-mha"][seed] - bits["h4-mha"][seed] for seed in bits["h4-mha"]]
    assert re.findall(r"\d\.\d{3}", outcomes["H6"]) == [f"{fmean(costs):.3f}"]
    (rule,) = re.findall(r"^\*\*Outcome:\*\* .*", page, re.MULTILINE)
    intervals = [student(leads("h32-headmix", other))[:2] for other in ("mha", "gain-x32", "mha-values-x32")]
    assert re.findall(r"\((.+?) … (.+?)\)", rule) == [(f"{low:.3f}", f"{high:.3f}") for low, high in intervals]
    early = leads("h32-headmix")
    assert " and ".join(f"{lead:.3f}" for lead in early) in page.replace("\n", " ")
    assert " and ".join(f"{100 * lead / cost:.0f}" for lead, cost in zip(early, costs, strict=True)) + " %" in page


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


def test_n_gram_models_of_the_picture_are_those_of_the_page():
    for row in table("language-model", "order", "3"):
        if row["order"].endswith("test"):
            assert {order: float(row[str(order)]) for order in gains.NGRAMS} == gains.NGRAMS
            return
    raise AssertionError("no row of n-gram models")


def test_every_number_of_the_summary_is_on_another_page():
    assert not numbers(SUMMARY) - set().union(*map(numbers, PAGES.values()))


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


def test_gap_within_the_long_trainings_is_that_of_their_logs():
    assert slowdown.gap() in " ".join(PAGES["language-model"].split())


PLANNED = [page for page in PAGES if pages.BETTER in PAGES[page]]


@pytest.mark.parametrize("page", PLANNED)
def test_no_prediction_is_decided_by_an_interval_that_includes_zero(page):
    contrasts = {row["planned contrast, bits"].split()[0]: row[pages.BETTER] for row in table(page, pages.BETTER)}
    outcomes = {row[""]: row["outcome"] for row in table(page, "contradicted by", "outcome")}
    undecided = [name for name, better in contrasts.items() if better.startswith("neither")]
    assert contrasts.keys() <= outcomes.keys()
    assert not [name for name in undecided if not outcomes[name].startswith("unclear")]


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
