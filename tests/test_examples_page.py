"""The page of the recipes speaks of every table and figure of the five documents, and of every recipe."""

import itertools
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

# What each document prints under a caption or a heading of its own.
DOCUMENTS = {
    "Mixhead": [*(f"table {n}" for n in range(1, 11)), "figure 1", "figure 2", "figure 3", "§4.2.4"],
    "Fixed multi-head attention": [
        *("theorem 1", "theorem 2", "table 1", "table 2 (A)", "table 2 (B)"),
        *("figure 1", "figure 2", "figure 3", "figure 4"),
    ],
    "Attention-head embeddings": [
        *("theoretical memory complexity", "parameters while scaling heads"),
        *("encoder-only models", "encoder-decoder models"),
    ],
    "Vocabulary bottleneck": [*(f"figure {n}" for n in range(1, 5)), "equation 5", "theorem 1"],
    "Multi-head attention (primer)": ["parameter count", "variations"],
}


def sections() -> dict[str, list[list[str]]]:
    """The cells of the lines of each section's table."""
    found = {}
    for section in (EXAMPLES / "README.md").read_text().split("\n### ")[1:]:
        title, _, text = section.partition("\n")
        lines = [line for line in text.splitlines() if line.startswith("|")][2:]
        found[title] = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return found


def named(cell: str) -> set[str]:
    """`table 1, figures 2, 3` names table 1, figure 2 and figure 3."""
    found, kind = set(), ""
    for part in re.split(r"[,;] ", cell):
        if match := re.match(r"(table|figure|theorem)s? (.*)", part):
            kind, part = match.groups()
        part = part.removeprefix(f"{kind} ")
        found.add(f"{kind} {part}" if re.match(r"\d", part) else part)
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_table_and_figure_has_a_line_that_names_its_recipe_or_says_why_not(document):
    (lines,) = (lines for title, lines in sections().items() if title.startswith(document))
    asked = set().union(*(named(line[0]) for line in lines))
    assert asked >= set(DOCUMENTS[document])
    for name, recipe, *_, differs in lines:
        assert "`" in recipe or (recipe == "none" and differs), f"{name}: neither a recipe nor why there is none"


def test_the_page_names_every_recipe_and_none_that_is_not_there():
    written = set(re.findall(r"`(\w+/\w+\.sh)`", (EXAMPLES / "README.md").read_text()))
    recipes = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("*/*.sh")}
    assert written == recipes


@pytest.mark.parametrize("recipe", sorted(EXAMPLES.glob("*/*.sh")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_head_of_a_recipe_has_the_parts_that_help_prints(recipe):
    lines = itertools.takewhile(lambda line: line.startswith("#"), recipe.read_text(encoding="utf-8").splitlines())
    labels = [match[1] for line in lines if (match := re.match(r"# (\w[\w ]*): ", line))]
    assert labels == ["What", "Table", "Result", "Time", "Our choice"]
