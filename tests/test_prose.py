"""The text of the project is easy to read: short sentences, short table cells, and none of the words that hide a subject."""

import ast
import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
SCRIPTS = sorted([*(ROOT / "examples").rglob("*.sh"), *(ROOT / "scripts").glob("*.sh")])
CODE = sorted(path for folder in ("fairseq_lowrank", "experiments") for path in (ROOT / folder).rglob("*.py"))
BANNED = re.compile(
    r"\b(beside|anew|foretold|of its own|of their own|what is asked|as fairseq has it|(?:go|goes|went) on|is no (?:file|folder|checkpoint))\b",
    re.IGNORECASE,
)
# One name for one thing: "half-scale start", "shuffled source", "planned contrast", "one factor per head", "our choice" and others.
DIALECT = re.compile(
    r"\b(from outside|(?:is|are) ours|bites|riddle|by the letter|reckoned|learnt|rivals|a factor a head|sentences as one"
    r"|wrong source|small(?:er)? start|named contrasts?|norms (?:before|behind) (?!sublayers, norms)|at hand|sub-words?)\b",
    re.IGNORECASE,
)
MEAN, LONG, MOST_LONG, CELL = 18, 30, 0.08, 2
"""Words in a sentence on average; words of a long one; the share of those; sentences in a table cell."""


def prose(page: Path) -> tuple[list[str], list[str]]:
    """The paragraphs and list items of a page, and the cells of its tables, without code and links' targets."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "Code", text)
    lines = [line for line in text.splitlines() if not line.startswith(("    ", "\t"))]
    cells = [
        cell.strip() for line in lines if line.lstrip().startswith("|") for cell in line.strip().strip("|").split("|")
    ]
    blocks = re.split(
        r"\n\s*\n|\n\s*(?=[-*] |\d+\. )", "\n".join(line for line in lines if not line.lstrip().startswith("|"))
    )
    blocks = [
        " ".join(block.split()).lstrip("-*0123456789. ") for block in blocks if not block.lstrip().startswith("#")
    ]
    return [block for block in blocks if block], cells


def sentences(text: str) -> list[str]:
    """Split at a full stop, question mark, or colon before a new sentence."""
    text = re.sub(r"\b(e\.g|i\.e|et al|eq|eqs|vs|No)\.", r"\1", text)
    return [part for part in re.split(r"(?<=[.!?:])[)*\"”]*\s+(?=[A-Z0-9`(*“\"])", text) if re.search(r"\w", part)]


def words(sentence: str) -> int:
    return len(re.findall(r"[\w'’./%-]*\w[\w'’./%-]*", sentence))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_has_short_sentences_and_cells(page):
    blocks, cells = prose(page)
    lengths = [words(sentence) for block in blocks for sentence in sentences(block)]
    if len(lengths) >= 10:
        assert sum(lengths) / len(lengths) <= MEAN
        assert sum(length > LONG for length in lengths) <= MOST_LONG * len(lengths)
    assert not [cell for cell in cells if len(sentences(cell)) > CELL]
    text = "\n".join([*blocks, *cells])
    assert not [match[0] for words in (BANNED, DIALECT) for match in words.finditer(text)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(ROOT)))
def test_comments_of_a_script_have_no_banned_words(script):
    lines = script.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if line.lstrip().startswith("#"))
    assert not [match[0] for words in (BANNED, DIALECT) for match in words.finditer(text)]


RECIPES = [script for script in SCRIPTS if script.parents[1].name == "examples"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: str(recipe.relative_to(ROOT)))
def test_head_of_a_recipe_says_what_which_table_result_time_and_choices(recipe):
    lines = itertools.takewhile(lambda line: line.startswith("#"), recipe.read_text(encoding="utf-8").splitlines())
    head = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines).partition("\n\n")[0]
    labels = ["What", "Table", "Result", "Time", "Our choice"]
    assert re.findall(r"^(\w[\w ]*): ", head, flags=re.MULTILINE) == labels
    parts = [" ".join(part.split()) for part in re.split(rf"^(?:{'|'.join(labels)}): ", head, flags=re.MULTILINE)[1:]]
    assert not [sentence for part in parts for sentence in sentences(part) if words(sentence) > 25]


def strings(path: Path) -> list[tuple[int, str]]:
    """The docstrings, messages and other texts of a module, with their lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_docstrings_and_messages_have_no_banned_words():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]}"
        for path in CODE
        for line, text in strings(path)
        for words in (BANNED, DIALECT)
        for match in words.finditer(text)
        if text != "bits a token that a wrong source costs"  # a metric of recorded lines
    ]
    assert not found, "\n".join(found)


# A capitalised word that is no third person ("Returns", but "Pass"), article, pronoun or conjunction.
OTHER_WORDS = (
    "An?|The|What|Whether|As|Of|How|Why|That|For|While|Where|If|In|See|It|Its|This|These|They|There|One|Each|Every"
)
VERB = re.compile(rf"(?!(?:{OTHER_WORDS})\b)[A-Z][a-z]*(?:[a-rt-z]|ss)\b")


def test_docstrings_of_functions_start_with_a_verb():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {text.splitlines()[0]}"
        for path in CODE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)) and not VERB.match(text)
        if not any(ast.unparse(mark).endswith("property") for mark in node.decorator_list)
    ]
    assert not found, "\n".join(found)
