"""Recognition of subwords in text, by their marks."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fairseq_lowrank.messages import UserError

# Marks of subwords, by the value of --remove-bpe that joins them.
MARKS = {"sentencepiece": re.compile(r"(?:^| )\u2581"), "subword_nmt": re.compile(r"\S@@(?: |$)")}


def subword_kind(text: str) -> str | None:
    """Return the value of `--remove-bpe` that joins the subwords of a text; None if it has whole words."""
    return next((kind for kind, mark in MARKS.items() if mark.search(text)), None)


def check_words(name: str, lines: Iterable[str]) -> None:
    """Refuse lines that are cut into subwords, whose BLEU is higher than that of words.

    Raises:
        UserError: a line has subwords of sentencepiece or subword-nmt.
    """
    for number, line in enumerate(lines, start=1):
        if kind := subword_kind(line):
            raise UserError(
                f"the {name} are cut into subwords (line {number}: {line[:60]!r}), and BLEU counts words. "
                f"Add --remove-bpe {kind} to fairseq-generate."
            )
