"""The word pieces that a pre-trained model reads: those of a published BERT, or of a corpus prepared here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from fairseq_lowrank.corpora.corpus import Argument, published_folder, work_folder
from fairseq_lowrank.corpora.text import BytePieces

PIECES_OF = Argument(
    "--pieces-of",
    part="-by-{}",
    value="[a-z0-9][a-z0-9.-]*",
    metavar="FORM",
    help="cut into the sub-words of a corpus that is prepared, such as brown-bpe8000 (default: word pieces of --vocabulary)",
)
VOCABULARY = Argument(
    "--vocabulary",
    metavar="FILE",
    help="BERT's vocab.txt, where no --pieces-of is given (default: $LOWRANK_DATA/bert-base-uncased/vocab.txt)",
)
# A run of letters, digits and marks, also over one of ' ’ - . & / , _ inside it, or any other character by itself.
WORD = r"[\w\p{M}]+(?:['’.&/,_-][\w\p{M}]+)*|[^\w\s\p{M}]\p{M}*|\p{M}+"


def words(text: str) -> list[tuple[int, int]]:
    """Where the words of a text begin and end; signs are words of their own, except inside one (37.80, Atlanta's)."""
    import regex

    return [match.span() for match in regex.finditer(WORD, text)]


class Cutter:
    """Cuts lines, and single words, into pieces.

    Args:
        pieces: cuts a line into pieces separated by blanks, each word for itself.
    """

    def __init__(self, pieces: Callable[[str], str]):
        self.pieces = pieces
        self.known: dict[str, list[str]] = {}

    def word(self, word: str) -> list[str]:
        """The pieces of one word."""
        if word not in self.known:
            self.known[word] = self.pieces(word).split()
        return self.known[word]

    def __call__(self, line: str) -> str:
        return " ".join(piece for start, end in words(line) for piece in self.word(line[start:end]))


def cutter_and_dictionary(args: argparse.Namespace) -> tuple[Cutter, Path]:
    """What cuts text as the arguments :data:`PIECES_OF` and :data:`VOCABULARY` say, and the dictionary of its pieces.

    Raises:
        ValueError: the corpus, or the vocabulary, is not there.
    """
    if args.pieces_of:
        folder = work_folder() / "data" / args.pieces_of
        model, dictionary = folder / "bpe.model", folder / "bin" / "dict.txt"
        if not (model.exists() and dictionary.exists()):
            raise ValueError(
                f"--pieces-of {args.pieces_of}: {folder} is not prepared, or not cut into sub-words; expected the name of such a "
                "corpus, such as brown-bpe8000, after scripts/prepare.sh brown-bpe8000"
            )
        return Cutter(BytePieces(model)), dictionary
    vocabulary = Path(args.vocabulary or published_folder() / "bert-base-uncased" / "vocab.txt")
    if not vocabulary.is_file():
        raise ValueError(
            f"{vocabulary} is not there: put the vocab.txt of a published BERT there, say where it is with --vocabulary FILE, or "
            "cut as a corpus is with --pieces-of, such as brown-bpe8000"
        )
    dictionary = args.output / "dict.txt"
    write_dictionary(read_lines(vocabulary), dictionary)
    return Cutter(WordPieces(vocabulary)), dictionary
