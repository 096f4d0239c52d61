"""Sentences of film reviews, positive or negative."""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.corpora.corpus import Corpus
from experiments.corpora.fetch import gather
from experiments.corpora.pieces import BERT, PIECES_OF
from experiments.corpora.sentences import Example, SentenceTask, write_task_data
from fairseq_lowrank.files import unpacked

URLS = {"https://www.cs.cornell.edu/people/pabo/movie-review-data/rt-polaritydata.tar.gz": None}
# Quotation marks and dashes of Windows-1252, which Latin-1 reads as control characters.
WINDOWS = {byte: bytes([byte]).decode("cp1252", "ignore") or chr(byte) for byte in range(0x80, 0xA0)}
TASK = SentenceTask("sentence-polarity", labels=("negative", "positive"))


def sentences(path: Path) -> list[str]:
    """Return the lines of a file in UTF-8, in UTF-8 encoded twice (by way of Latin-1), or in Windows-1252, as published."""
    with unpacked(path) as file:
        data = file.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return [once(line).translate(WINDOWS) for line in text.split("\n") if line.strip()]


def once(line: str) -> str:
    """Return a line without its second encoding, if it has one."""
    try:
        return line.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return line


def sentence_polarity(args: argparse.Namespace) -> Path:
    """Prepare sentence polarity (Pang and Lee, 2005): 5,331 positive and 5,331 negative sentences of film reviews.

    There is no published split. Of each ten sentences of a label, the eighth is for the test, the fourth for validation.
    """
    files = gather(args, ["rt-polarity.neg", "rt-polarity.pos"], URLS)
    splits = {"train": [], "valid": [], "test": []}
    for label, file in zip(TASK.labels, files, strict=True):
        for number, sentence in enumerate(sentences(file)):
            split = {3: "valid", 7: "test"}.get(number % 10, "train")
            splits[split].append(Example((sentence,), label))
    return write_task_data(args, TASK, splits)


CORPUS = Corpus(
    name="sentence-polarity",
    prepare=sentence_polarity,
    arguments=(PIECES_OF, BERT),
    smoke_values={},
    training=lambda values: TASK.training,
    download=1,
)
