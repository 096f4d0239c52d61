"""SuperGLUE (Wang et al., 2019): the tasks that are questions on one or two texts, each answered by itself."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from experiments.corpora.corpus import Argument, Corpus
from experiments.corpora.fetch import gather
from experiments.corpora.pieces import BERT, PIECES_OF
from experiments.corpora.sentences import Example, SentenceTask, lay_out
from fairseq_lowrank.files import read_lines
from fairseq_lowrank.messages import UserError

URL = "https://dl.fbaipublicfiles.com/glue/superglue/data/v2/{}.zip"
TRUTH = ("0", "1")
SPELT = {"0": "false", "1": "true"}


def truth(record: dict) -> str | None:
    """A label that is true or false, or 1 or 0."""
    return None if "label" not in record else str(int(record["label"]))


# Questions stand first: of what is longer than the model the end is cut off, which is then the passage's.
def boolq(record: dict) -> Iterator[Example]:
    yield Example((record["question"], record["passage"]), truth(record))


def entailment(record: dict) -> Iterator[Example]:
    yield Example((record["premise"], record["hypothesis"]), record.get("label"))


def wic(record: dict) -> Iterator[Example]:
    """The word in question stands before the first sentence: the layout has no place for its positions."""
    yield Example((f"{record['word']} : {record['sentence1']}", record["sentence2"]), truth(record))


def multirc(record: dict) -> Iterator[Example]:
    """Each answer to each question on a passage by itself."""
    for question in record["passage"]["questions"]:
        for answer in question["answers"]:
            yield Example((f"{question['question']} {answer['text']}", record["passage"]["text"]), truth(answer))


# Folder and archive, task, and how a line becomes examples.
TASKS: dict[str, tuple[str, SentenceTask, Callable[[dict], Iterator[Example]]]] = {
    "boolq": ("BoolQ", SentenceTask("boolq", TRUTH, server={"test": "BoolQ.jsonl"}, answers=SPELT), boolq),
    "cb": (
        "CB",
        SentenceTask(
            *("cb", ("entailment", "contradiction", "neutral"), ("accuracy", "macro-f1")), server={"test": "CB.jsonl"}
        ),
        entailment,
    ),
    "rte": (
        "RTE",
        SentenceTask("superglue-rte", ("entailment", "not_entailment"), server={"test": "RTE.jsonl"}),
        entailment,
    ),
    "wic": ("WiC", SentenceTask("wic", TRUTH, server={"test": "WiC.jsonl"}, answers=SPELT), wic),
    "multirc": ("MultiRC", SentenceTask("multirc", TRUTH, ("f1",)), multirc),
}


def superglue(args: argparse.Namespace) -> Path:
    """A task of SuperGLUE (Wang et al., 2019): BoolQ, CB, RTE, WiC or MultiRC, from super.gluebenchmark.com's files.

    WiC comes without the places of its word, MultiRC answer by answer and scored by F1 over all of them (its F1a; its exact
    match needs all answers to a question). COPA, WSC and ReCoRD compare candidates with one another, which this layout of single
    decisions does not.
    """
    folder, task, read = TASKS[args.task]
    names = {"train": "train.jsonl", "valid": "val.jsonl", "test": "test.jsonl"}
    files = gather(args, [f"{folder}/{name}" for name in names.values()], {URL.format(folder): None})
    return lay_out(args, task, {split: records(path, read) for split, path in zip(names, files, strict=True)})


def records(path: Path, read: Callable[[dict], Iterator[Example]]) -> Iterator[Example]:
    """The examples of a file of JSON lines."""
    for number, line in enumerate(read_lines(path), start=1):
        try:
            yield from read(json.loads(line))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise UserError(f"{path}, line {number}: not a record of this task ({error!r})") from error


CORPUS = Corpus(
    name="superglue",
    prepare=superglue,
    arguments=(
        Argument("--task", part="-{}", choices=tuple(TASKS), default="rte", help="which one (default: %(default)s)"),
        PIECES_OF,
        BERT,
    ),
    training=lambda values: TASKS[values["task"]][1].training,
)
