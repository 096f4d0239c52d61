"""Subwords: their marks in text and dictionaries, and the models that cut words into them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from fairseq_lowrank.files import read_lines
from fairseq_lowrank.messages import UserError

# Marks of subwords, by the value of --remove-bpe that joins them.
MARKS = {"sentencepiece": re.compile(r"(?:^| )\u2581"), "subword_nmt": re.compile(r"\S@@(?: |$)")}


def subword_kind(text: str) -> str | None:
    """Return the value of `--remove-bpe` that joins the subwords of a text; None if it has whole words."""
    return next((kind for kind, mark in MARKS.items() if mark.search(text)), None)


def kind_of_dictionary(path: Path) -> str | None:
    """Return the value of `--remove-bpe` that joins the subwords of a dictionary of fairseq; None if it has whole words."""
    kinds = Counter(subword_kind(line.rpartition(" ")[0]) for line in read_lines(path))
    # a single word of a text may look like a subword
    return next((kind for kind in MARKS if kinds[kind] > kinds.total() / 100), None)


def is_lowercase(path: Path) -> bool:
    """Return True if no entry of a dictionary of fairseq has a capital letter."""
    return all(line == line.lower() for line in read_lines(path))


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


def joined(tokens: str, kind: str | None) -> str:
    """Return the words of tokens that are separated by blanks; like fairseq's `--remove-bpe KIND`."""
    if kind == "sentencepiece":
        return tokens.replace(" ", "").replace("\u2581", " ").strip()
    return f"{tokens} ".replace("@@ ", "").rstrip() if kind == "subword_nmt" else tokens


class SentencePieces:
    """The subwords of a sentencepiece model.

    A model over UTF-8 bytes has a character for each byte: printable ASCII, and 256 + b for any other byte b.
    """

    def __init__(self, model: Path):
        import sentencepiece

        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        except RuntimeError as error:
            raise UserError(
                f"{model} is not a model of sentencepiece ({error}). Give the model of the subwords."
            ) from error
        pieces = (self.processor.id_to_piece(number) for number in range(self.processor.get_piece_size()))
        self.of_bytes = chr(0x1FF) in pieces

    def __call__(self, line: str) -> str:
        if self.of_bytes:
            line = "".join(chr(byte if 0x20 <= byte < 0x7F else 0x100 + byte) for byte in line.encode())
        return " ".join(self.processor.encode(line, out_type=str))
