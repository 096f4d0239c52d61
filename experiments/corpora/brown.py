"""The Brown corpus."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from experiments.corpora.corpus import Corpus
from experiments.corpora.fetch import gather, make
from experiments.corpora.steps import BYTES, HEAD, language_model
from fairseq_lowrank.files import read_lines, write_lines
from fairseq_lowrank.messages import UserError

URLS = {
    "https://raw.githubusercontent.com/nltk/nltk_data/gh-pages/packages/corpora/brown.zip": (
        "9b275f9b3b95d7bd66ccfb7cd259f445a13bbe5d1f4107aba09fd3e8364bafa6"
    )
}


def brown_document(path: Path) -> Iterator[str]:
    """Yield the sentences of a file of NLTK's copy, without the tags in word/tag."""
    for line in read_lines(path):
        if words := line.split():
            yield " ".join(word.rsplit("/", 1)[0] for word in words)


def brown_split(documents: list[Path], split: str) -> Iterator[str]:
    """Yield the lines of a split, with an empty line after each document: of 20 documents, the 8th is test, the 14th valid."""
    splits = {7: "test", 13: "valid"}
    for number, path in enumerate(documents):
        if splits.get(number % 20, "train") == split:
            yield from chain(brown_document(path), [""])


def brown(args: argparse.Namespace) -> Path:
    """Prepare the Brown corpus, split by document, one sentence per line: cased words, or subwords with --pieces.

    It needs NLTK's copy (500 files, ca01 to cr09), or train.txt, valid.txt and test.txt made from it.
    """
    splits = ("train", "valid", "test")
    [found] = gather(args, ["train.txt|cr09"], URLS)
    if found.name == "cr09":
        documents = sorted(path for path in found.parent.iterdir() if re.fullmatch(r"c[a-r]\d\d", path.name))
        if len(documents) != 500:
            raise UserError(
                f"{found.parent} has {len(documents)} of the Brown corpus's 500 documents. Download it again with --download."
            )
        for split in splits:
            raw = args.output / "raw" / f"{split}.txt"
            make(raw, write_lines, raw, brown_split(documents, split))
        files = [args.output / "raw" / f"{split}.txt" for split in splits]
    else:
        files = gather(args, [f"{split}.txt" for split in splits], URLS)
    return language_model(args, {split: [file] for split, file in zip(splits, files, strict=True)})


CORPUS = Corpus(name="brown", prepare=brown, arguments=(HEAD, BYTES), smoke_values={"head": 500}, download=3)
