"""The pages: their commands are accepted, their Python runs, their links lead somewhere, and generated pages are up to date."""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

from fairseq import options

import fairseq_lowrank.plugin  # noqa: F401
from experiments import reference
from fairseq_lowrank import __version__
from fairseq_lowrank.attention import Method, Paper, register
from fairseq_lowrank.methods.gated import Gate

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
PARSERS = {
    "fairseq-train": options.get_training_parser,
    "fairseq-generate": options.get_generation_parser,
    "fairseq-eval-lm": options.get_eval_lm_parser,
    "fairseq-interactive": options.get_interactive_generation_parser,
    "fairseq-preprocess": options.get_preprocessing_parser,
}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """The commands of fairseq in a page, without those that leave something out."""
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    found = [shlex.split(line.partition(" > ")[0], comments=True) for line in lines if "…" not in line]
    return [words for words in found if words and words[0] in PARSERS]


@pytest.mark.parametrize(
    ("page", "count"),
    [("README.md", 2), ("docs/translation.md", 4), ("docs/bert.md", 4), ("docs/language-models.md", 10)],
)
def test_fairseq_accepts_every_command_of_a_page(page, count):
    found = commands(page)
    assert len(found) == count
    for name, *words in found:
        if name == "fairseq-preprocess":
            PARSERS[name]().parse_args(words)
            continue
        place = words.index("--user-dir")
        assert words[place + 1] in ("$LOWRANK", "$(fairseq-lowrank user-dir)"), (
            "the name of the folder works in a clone alone"
        )
        args = options.parse_args_and_arch(PARSERS[name](), input_args=words[:place] + words[place + 2 :])
        assert args.data.startswith(("$", "data-bin/"))


@pytest.mark.parametrize("page", ["README.md", "docs/pytorch.md", "docs/transformers.md"])
def test_python_of_a_page_runs(page, tmp_path, monkeypatch, methods_leave):
    if page == "docs/transformers.md":
        pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    found = blocks(page, "python")
    assert found
    for block in found:
        exec(compile(block, page, "exec"), {})


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        place = (page.parent / file).resolve() if file else page
        assert place.exists(), target
        if anchor:
            assert anchor in anchors(place), target


@pytest.mark.parametrize("name", reference.PAGES)
def test_generated_text_is_up_to_date(name):
    if name == "docs/transformers.md":
        pytest.importorskip("transformers")
    if name.startswith("docs/evidence/"):
        pytest.importorskip("scipy")
    assert (ROOT / name).read_text(encoding="utf-8") == reference.text_of(name), "run python -m experiments reference"


def test_a_method_is_in_the_tables_once_it_is_declared(methods_leave):
    pytest.importorskip("transformers")
    method = Method(
        "new", "A new method", "O_i", {"head_output": Gate}, papers=(Paper("A title", "Doe 2027", "address"),)
    )
    register(method)
    assert re.search(r"^\| no \| .*`new`", reference.leaving_page(), re.MULTILINE)
    assert re.search(r"^\| `preset` \| .*`new`", reference.transformers_page(), re.MULTILINE)


def test_citations_have_the_version_of_the_package():
    assert f"version = {{{__version__}}}" in (ROOT / "docs/README.md").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
