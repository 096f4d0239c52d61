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
    found = [shlex.split(line, comments=True) for line in lines if "…" not in line]
    return [words for words in found if words and words[0] in PARSERS]


@pytest.mark.parametrize(
    ("page", "count"),
    [("README.md", 3), ("docs/translation.md", 2), ("docs/bert.md", 4), ("docs/language-models.md", 9)],
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


# Where a reader finds an answer: in the README, or in a page that it links.
ANSWERS = {
    "how do I add it to my training command?": ("README.md", '--user-dir "$(fairseq-lowrank user-dir)"'),
    "does it work with --fp16?": ("README.md", "`--fp16` or `--amp` on a GPU"),
    "which Python?": ("README.md", "Python 3.11.4 to 3.13"),
    "how do I load a checkpoint in Python?": ("README.md", "TransformerModel.from_pretrained("),
    "what does mixing cost?": ("README.md", "time, n 512 / n 2048"),
    "does Mixhead help in translation?": ("README.md", "post-norm translation at 2e-3"),
    "does it work with Llama?": ("README.md", "Llama"),
    "what is Mixhead?": ("README.md", "*Mixhead* gives each head a learned sum of all heads' probabilities"),
    "how many BLEU?": ("README.md", "lead in bits of training loss; in BLEU"),
    "how do I measure a model of transformers?": ("README.md", "measure --transformers FOLDER"),
    "which regularisers?": ("docs/attention.md", "## Regularisers"),
    "how do I leave fairseq?": ("docs/leaving-fairseq.md", "fairseq-lowrank export"),
    "how do I cite it?": ("docs/README.md", "@software{fairseq_lowrank"),
    "how do I compare two trainings?": ("docs/results-format.md", "fairseq-lowrank compare"),
    "what does the plugin change in fairseq?": ("docs/fairseq.md", "It changes no file"),
    "how do I add a method?": ("CONTRIBUTING.md", "## A new method"),
    "how do I add a method without a clone?": ("docs/pytorch.md", "## Your own method without a clone"),
    "Mixhead A or B?": ("docs/choosing.md", "## Mixhead A or B?"),
    "which learning rate for mixing?": ("docs/choosing.md", "## Which learning rate for mixing?"),
    "how do I go back to plain attention?": ("docs/tools.md", "| mixing | to no mixing | why |"),
    "how many heads are enough?": ("docs/tools.md", "fairseq-lowrank advise"),
    "how do I train the control of half scale?": ("README.md", "--arch transformer_small_start_iwslt_de_en"),
    "how do I use it in my nn.Transformer?": ("docs/pytorch.md", "replace_attention(model"),
    "can I compile, export or script it?": ("docs/pytorch.md", "TorchScript is refused"),
    "can I add gates to a model of transformers?": ("docs/transformers.md", "`gated-head`, `gated`"),
    "what is the bottleneck?": ("docs/bottleneck.md", "S has rank d_k at most"),
}


@pytest.mark.parametrize("question", ANSWERS)
def test_a_question_is_answered_one_click_from_the_readme(question):
    page, answer = ANSWERS[question]
    assert answer in (ROOT / page).read_text(encoding="utf-8")
    assert page == "README.md" or re.search(rf"\]\({page}[)#]", (ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", reference.PAGES)
def test_generated_text_is_up_to_date(name):
    if name == "docs/transformers.md":
        pytest.importorskip("transformers")
    if name.startswith(("docs/evidence/", "docs/data/")):
        pytest.importorskip("scipy")
    assert (ROOT / name).read_text(encoding="utf-8") == reference.text_of(name), "run python -m experiments reference"


def test_a_method_is_in_the_tables_once_it_is_declared(methods_leave):
    pytest.importorskip("transformers")
    method = Method(
        "new", "A new method", "O_i", {"head_output": Gate}, papers=(Paper("A title", "Doe 2027", "address"),)
    )
    register(method)
    assert re.search(
        r"^\| what happens to the outputs of heads .*`new` .*; Doe 2027\b", reference.readme(), re.MULTILINE
    )
    assert re.search(r"^\| `preset` \| .*`new`", reference.transformers_page(), re.MULTILINE)


def test_citations_have_the_version_of_the_package():
    assert f"version = {{{__version__}}}" in (ROOT / "docs/README.md").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


# The most words of a page, without its blocks of code. Pages that are written from the code have no limit.
MOST_WORDS = {
    "README.md": 1300,
    "docs/bert.md": 900,
    "docs/choosing.md": 720,
    "docs/kernels.md": 1300,
    "docs/performance.md": 900,
    "docs/tools.md": 1_730,
}


@pytest.mark.parametrize("page", MOST_WORDS)
def test_page_is_short(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(text.split()) <= MOST_WORDS[page]


def test_changelog_names_breaking_changes_first():
    order = ["Breaking", "Fixed (results change)", "Added", "Changed"]
    for version in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        headings = re.findall(r"^### (.*)$", version, flags=re.MULTILINE)
        assert headings and headings == [heading for heading in order if heading in headings]
