"""SuperGLUE (Wang et al., 2019): the tasks whose questions on one or two texts are answered separately."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from experiments.corpora.corpus import Argument, Corpus
from experiments.corpora.fetch import gather
from experiments.corpora.pieces import BERT, PIECES_OF
from experiments.corpora.sentences import Example, SentenceTask, write_task_data
from fairseq_lowrank.files import read_lines
from fairseq_lowrank.messages import UserError

URL = "https://dl.fbaipublicfiles.com/glue/superglue/data/v2/{}.zip"
TRUTH = ("0", "1")
SPELT = {"0": "false", "1": "true"}


def truth(record: dict) -> str | None:
    """Return a label that is true or false, or 1 or 0, as "1" or "0"; None if there is none."""
    return None if "label" not in record else str(int(record["label"]))


# Questions come first: if the text is too long for the model, the end of the passage is cut off.
def boolq(record: dict) -> Iterator[Example]:
    yield Example((record["question"], record["passage"]), truth(record))


def entailment(record: dict) -> Iterator[Example]:
    yield Example((record["premise"], record["hypothesis"]), record.get("label"))


def wic(record: dict) -> Iterator[Example]:
    """Yield an example with the word before the first sentence; the format has no field for the word's positions."""
    yield Example((f"{record['word']} : {record['sentence1']}", record["sentence2"]), truth(record))


def multirc(record: dict) -> Iterator[Example]:
    """Yield an example for each answer to each question on a passage."""
    for question in record["passage"]["questions"]:
        for answer in question["answers"]:
            yield Example((f"{question['question']} {answer['text']}", record["passage"]["text"]), truth(answer))


# For each task: folder and archive, task, and the function from a line to examples.
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
    """Prepare a task of SuperGLUE (Wang et al., 2019): BoolQ, CB, RTE, WiC or MultiRC, from super.gluebenchmark.com.

    WiC has no positions of its word. MultiRC has an example for each answer, and its score is F1 over all answers (F1a); its
    exact match would need all answers to a question together. COPA, WSC and ReCoRD compare candidates, which this format of
    single decisions does not support.
    """
    folder, task, read = TASKS[args.task]
    names = {"train": "train.jsonl", "valid": "val.jsonl", "test": "test.jsonl"}
    files = gather(args, [f"{folder}/{name}" for name in names.values()], {URL.format(folder): None})
    return write_task_data(args, task, {split: records(path, read) for split, path in zip(names, files, strict=True)})


def records(path: Path, read: Callable[[dict], Iterator[Example]]) -> Iterator[Example]:
    """Yield the examples of a file of JSON lines."""
    for number, line in enumerate(read_lines(path), start=1):
        try:
            yield from read(json.loads(line))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise UserError(
                f"{path}, line {number}: not a record of this task ({error!r}). Download it again."
            ) from error


CORPUS = Corpus(
    name="superglue",
    prepare=superglue,
    arguments=(
        Argument("--task", part="-{}", choices=tuple(TASKS), default="rte", help="task (default: %(default)s)"),
        PIECES_OF,
        BERT,
    ),
    training=lambda values: TASKS[values["task"]][1].training,
    download=60,
)
