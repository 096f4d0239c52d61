"""Film reviews in sentences, favourable or not."""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.corpora.corpus import Corpus
from experiments.corpora.fetch import gather
from experiments.corpora.pieces import BERT, PIECES_OF
from experiments.corpora.sentences import Example, SentenceTask, lay_out
from fairseq_lowrank.files import unpacked

URLS = {"https://www.cs.cornell.edu/people/pabo/movie-review-data/rt-polaritydata.tar.gz": None}
# Quotation marks and dashes of Windows-1252, which Latin-1 reads as control characters.
WINDOWS = {byte: bytes([byte]).decode("cp1252", "ignore") or chr(byte) for byte in range(0x80, 0xA0)}
TASK = SentenceTask("sentence-polarity", labels=("negative", "positive"))


def sentences(path: Path) -> list[str]:
    """The lines of a file in UTF-8, in UTF-8 that was taken for Latin-1 and encoded again, or, as it was published, in Windows-1252."""
    with unpacked(path) as file:
        data = file.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return [once(line).translate(WINDOWS) for line in text.split("\n") if line.strip()]


def once(line: str) -> str:
    """A line without a second encoding, where it has one."""
    try:
        return line.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return line


def sentence_polarity(args: argparse.Namespace) -> Path:
    """Sentence polarity (Pang and Lee, 2005): 5,331 favourable and 5,331 unfavourable sentences of film reviews.

    Nobody published a split: of each ten of a kind the eighth is for the test, the fourth for validation.
    """
    files = gather(args, ["rt-polarity.neg", "rt-polarity.pos"], URLS)
    splits = {"train": [], "valid": [], "test": []}
    for label, file in zip(TASK.labels, files, strict=True):
        for number, sentence in enumerate(sentences(file)):
            split = {3: "valid", 7: "test"}.get(number % 10, "train")
            splits[split].append(Example((sentence,), label))
    return lay_out(args, TASK, splits)


CORPUS = Corpus(
    name="sentence-polarity",
    prepare=sentence_polarity,
    arguments=(PIECES_OF, BERT),
    trial={},
    training=lambda values: TASK.training,
)
