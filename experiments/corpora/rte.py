"""Recognising textual entailment, the first three challenges: two thirds of what became GLUE's RTE."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from experiments.corpora.corpus import Corpus
from experiments.corpora.fetch import gather
from experiments.corpora.pieces import BERT, PIECES_OF
from experiments.corpora.sentences import Example, SentenceTask, write_task_data
from fairseq_lowrank.files import unpacked
from fairseq_lowrank.messages import UserError

URLS = {"https://raw.githubusercontent.com/nltk/nltk_data/gh-pages/packages/corpora/rte.zip": None}
TASK = SentenceTask("rte", labels=("entailment", "not_entailment"))
LABELS = {"TRUE": "entailment", "YES": "entailment", "FALSE": "not_entailment", "NO": "not_entailment"}


def pairs(path: Path) -> Iterator[Example]:
    """Yield the pairs of a challenge's file, whose attribute is called `entailment` or `value`."""
    with unpacked(path) as file:
        try:
            root = ElementTree.parse(file).getroot()
        except ElementTree.ParseError as error:
            raise UserError(f"{path} is not valid XML: {error}. Download it again.") from error
    for pair in root.iter("pair"):
        told = pair.get("entailment") or pair.get("value") or ""
        if told not in LABELS:
            raise UserError(
                f"{path}: pair {pair.get('id')} has entailment {told!r}, expected one of {', '.join(LABELS)}"
            )
        yield Example((pair.findtext("t") or "", pair.findtext("h") or ""), LABELS[told])


def rte(args: argparse.Namespace) -> Path:
    """Prepare textual entailment, RTE 1 to 3, in pairs of sentences: is the second true if the first is?

    RTE 3's test part is the test set. Of the other pairs, those of every tenth text are for validation and the rest for training,
    so no text is in both. (Three texts of RTE 3's test part are also in earlier parts, with other second sentences.)
    """
    parts = [(number, part) for number in (1, 2, 3) for part in ("dev", "test")]
    *others, test = gather(args, [f"rte{number}_{part}.xml" for number, part in parts], URLS)
    examples = [example for path in others for example in pairs(path)]
    texts = {text: index for index, text in enumerate(dict.fromkeys(example.sentences[0] for example in examples))}
    splits = {
        "train": [example for example in examples if texts[example.sentences[0]] % 10 != 9],
        "valid": [example for example in examples if texts[example.sentences[0]] % 10 == 9],
        "test": list(pairs(test)),
    }
    return write_task_data(args, TASK, splits)


CORPUS = Corpus(
    name="rte",
    prepare=rte,
    arguments=(PIECES_OF, BERT),
    smoke_values={},
    training=lambda values: TASK.training,
    download=1,
)
