"""Division of a text into words, and of words into subwords."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fairseq_lowrank.subwords import SentencePieces

# A word is a run of letters, digits and marks, or a single other sign. In sentences, as in the Brown corpus, one of
# ' ’ . & / , _ - inside a run belongs to it (37.80, Atlanta's). In paragraphs it does not: an answer may begin at any sign.
LETTERS, SIGN = r"[\w\p{M}\p{N}]+", r"[^\w\s\p{M}\p{N}]\p{M}*"
IN_SENTENCES = rf"{LETTERS}(?:['’.&/,_-]{LETTERS})*|{SIGN}"
IN_PARAGRAPHS = rf"{LETTERS}|{SIGN}"


def words(text: str, pattern: str = IN_PARAGRAPHS) -> list[tuple[int, int]]:
    """Return begin and end of each word of a text."""
    import regex

    return [match.span() for match in regex.finditer(pattern, text)]


class Cutter:
    """A function that cuts lines, and single words, into subwords.

    Args:
        pieces: a function that cuts a line into subwords separated by blanks, each word separately.
    """

    def __init__(self, pieces: Callable[[str], str]):
        self.pieces = pieces
        self.known: dict[str, list[str]] = {}

    def word(self, word: str) -> list[str]:
        """Return the subwords of one word."""
        if word not in self.known:
            self.known[word] = self.pieces(word).split()
        return self.known[word]

    def __call__(self, line: str, pattern: str = IN_SENTENCES) -> str:
        return " ".join(piece for start, end in words(line, pattern) for piece in self.word(line[start:end]))


def load_cutter(model: Path | None) -> Cutter:
    """Return a cutter for wordpieces.json of `bert import` or for a sentencepiece model; with None, words stay whole."""
    if model is None:
        return Cutter(str)
    from experiments.corpora.wordpieces import WordPieces

    with open(model, "rb") as file:
        kind = WordPieces if file.read(1) == b"{" else SentencePieces
    return Cutter(kind(model))
