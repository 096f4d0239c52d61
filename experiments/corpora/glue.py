"""GLUE (Wang et al., 2018): nine tasks, from the files on its site."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.corpora.corpus import Argument, Corpus
from experiments.corpora.fetch import gather
from experiments.corpora.pieces import BERT, PIECES_OF
from experiments.corpora.sentences import Example, SentenceTask, write_task_data
from fairseq_lowrank.files import read_lines, say
from fairseq_lowrank.messages import UserError

URL = "https://dl.fbaipublicfiles.com/glue/data/{}.zip"
BINARY, ENTAILMENT = ("0", "1"), ("entailment", "not_entailment")
ONE = {"train": "train.tsv", "valid": "dev.tsv", "test": "test.tsv"}
TWO = {
    **{"train": "train.tsv", "valid": "dev_matched.tsv", "valid1": "dev_mismatched.tsv"},
    **{"test": "test_matched.tsv", "test1": "test_mismatched.tsv"},
}


@dataclass(frozen=True)
class Published:
    """The published files of a task.

    Args:
        folder: the folder of its files, which is also the name of the archive and of the file for the server.
        columns: the names of the columns of sentences.
        target: the name of the column to predict.
        task: labels and measures.
        files: the file of each split.
        bare: the numbers of the columns, for splits whose files have no header.
    """

    folder: str
    columns: tuple[str, ...]
    target: str
    task: SentenceTask
    files: dict[str, str]
    bare: dict[str, int] | None = None


def publish(
    folder: str, name: str, columns: str, target: str, labels: tuple[str, ...], measures: str, **more
) -> Published:
    mnli = name == "mnli"
    server = {"test": "MNLI-m.tsv", "test1": "MNLI-mm.tsv"} if mnli else {"test": f"{folder}.tsv"}
    names = {split: f"mnli-m{'m' * split.endswith('1')}" for split in ("valid", "valid1", "test", "test1")}
    task = SentenceTask(name, labels, tuple(measures.split()), server, names=names if mnli else None)
    return Published(folder, tuple(columns.split()), target, task, TWO if mnli else ONE, **more)


TASKS = {
    one.task.name: one
    for one in (
        publish("CoLA", "cola", "sentence", "label", BINARY, "matthews", bare={"label": 1, "sentence": 3}),
        publish("SST-2", "sst-2", "sentence", "label", BINARY, "accuracy"),
        publish("MRPC", "mrpc", "#1_String #2_String", "Quality", BINARY, "f1 accuracy"),
        publish("STS-B", "sts-b", "sentence1 sentence2", "score", (), "pearson spearman"),
        publish("QQP", "qqp", "question1 question2", "is_duplicate", BINARY, "f1 accuracy"),
        publish(
            *(
                "MNLI",
                "mnli",
                "sentence1 sentence2",
                "gold_label",
                ("entailment", "neutral", "contradiction"),
                "accuracy",
            )
        ),
        publish("QNLI", "qnli", "question sentence", "label", ENTAILMENT, "accuracy"),
        publish("RTE", "rte", "sentence1 sentence2", "label", ENTAILMENT, "accuracy"),
        publish("WNLI", "wnli", "sentence1 sentence2", "label", BINARY, "accuracy"),
    )
}


def examples(path: Path, published: Published, split: str) -> Iterator[Example]:
    """Yield the examples of a file of tab-separated columns, in which quotation marks have no special meaning.

    Lines with too few columns are refused, except in training parts: there they are left out (QQP's has a few).
    """
    rows = whole_rows(csv.reader(read_lines(path), delimiter="\t", quoting=csv.QUOTE_NONE), path)
    bare = published.bare if split.startswith(("train", "valid")) else None
    header = [] if bare else [name.strip().replace(" ", "_") for name in next(rows, [])]
    places = bare or {name: place for place, name in enumerate(header)}
    labelled = not split.startswith("test")
    wanted = [*published.columns, *([published.target] if labelled else [])]
    if missing := [name for name in wanted if name not in places]:
        raise UserError(f"{path} has no column {', '.join(missing)}; its first line is {header}. Download it again.")
    left_out = 0
    for number, row in enumerate(rows, start=2 - bool(bare)):
        if len(row) <= max(places[name] for name in wanted):
            if split != "train":
                raise UserError(f"{path}, line {number}: {len(row)} columns, expected {len(places)}")
            left_out += 1
            continue
        label = row[places[published.target]] if labelled else None
        yield Example(tuple(row[places[name]] for name in published.columns), label)
    if left_out:
        say(f"{path}: {left_out} lines lack columns and are left out")


def whole_rows(reader: Iterator[list[str]], path: Path) -> Iterator[list[str]]:
    """Yield the rows of a csv reader; if it fails, as at a line's end within a field, the error names the line."""
    try:
        yield from reader
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}. Download it again.") from error


def glue(args: argparse.Namespace) -> Path:
    """Prepare a task of GLUE (Wang et al., 2018), from the files of gluebenchmark.com.

    MNLI's matched and mismatched parts become valid and valid1, test and test1. The test parts have no labels:
    `python -m experiments bert predict` writes the files for the server. MRPC is not in GLUE's archives; the benchmark's download script
    makes its files from Microsoft's. The diagnostic set is not used.
    """
    published = TASKS[args.task]
    names = [f"{published.folder}/{file}" for file in published.files.values()]
    archive = {"qqp": "QQP-clean", "qnli": "QNLIv2"}.get(
        args.task, published.folder
    )  # QNLI.zip has another split, which was withdrawn
    urls = {} if args.task == "mrpc" else {URL.format(archive): None}
    files = gather(args, names, urls, note="GLUE's download_glue_data.py" if args.task == "mrpc" else "")
    splits = {split: examples(path, published, split) for split, path in zip(published.files, files, strict=True)}
    return write_task_data(args, published.task, splits)


CORPUS = Corpus(
    name="glue",
    prepare=glue,
    arguments=(
        Argument("--task", part="-{}", choices=tuple(TASKS), default="rte", help="task (default: %(default)s)"),
        PIECES_OF,
        BERT,
    ),
    smoke_corpus=lambda values: "sentence-polarity" if len(TASKS[values["task"]].columns) == 1 else "rte",
    training=lambda values: TASKS[values["task"]].task.training,
    download=320,
)
