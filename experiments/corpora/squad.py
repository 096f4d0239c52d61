"""SQuAD 1.1 and 2.0: questions on paragraphs, answered by a span of the paragraph, and corpora of the same format.

question/ paragraph/    dict.txt and the binarised questions and paragraphs of each split
SPLIT.jsonl             one line per paragraph: its text, the positions of its words, the subwords of each, and its questions
task.json               :class:`QuestionTask`
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.corpora.corpus import Argument, Corpus
from experiments.corpora.cutting import IN_PARAGRAPHS, Cutter, words
from experiments.corpora.fetch import gather, make
from experiments.corpora.pieces import BERT, PIECES_OF, load_cutter_and_dictionary
from experiments.corpora.sentences import binarise_splits, write_task
from experiments.corpora.steps import check_settings
from fairseq_lowrank.files import read_lines, whole_file, whole_folder
from fairseq_lowrank.messages import UserError

URL = "https://rajpurkar.github.io/SQuAD-explorer/dataset/"


@dataclass(frozen=True)
class QuestionTask:
    """A task of questions on paragraphs.

    Args:
        name: the task's name in tables.
        unanswerable: True if some questions have no answer.
    """

    name: str
    unanswerable: bool = False

    @property
    def training(self) -> list[str]:
        """Return fairseq-train's flags."""
        flags = ["--task", "question_answering", "--criterion", "question_answering"]
        return [*flags, "--best-checkpoint-metric", "span_accuracy", "--maximize-best-checkpoint-metric"]


def read_paragraphs(path: Path) -> Iterator[dict]:
    """Yield the paragraphs of a file in SQuAD's format, with `context` and `qas`.

    Raises:
        UserError: the format is another one, or an answer is not at its position.
    """
    try:
        articles = json.loads("\n".join(read_lines(path)))["data"]
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        for paragraph in paragraphs:
            for question in paragraph["qas"]:
                for answer in question["answers"]:
                    start, text = answer["answer_start"], answer["text"]
                    if paragraph["context"][start : start + len(text)] != text:
                        raise UserError(
                            f"{path}: the answer to {question['id']} is not at character {start}. Download it again."
                        )
                question["id"], question["question"]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not in SQuAD's format: {error!r}. Download it again.") from error
    yield from paragraphs


def write_question_data(args: argparse.Namespace, task: QuestionTask, splits: Mapping[str, Sequence[dict]]) -> Path:
    """Cut the paragraphs of each split into subwords and binarise them; return the folder of the binary files."""
    check_settings(args, keep=True)
    cutter, dictionary = load_cutter_and_dictionary(args)
    pieces = args.output / "bpe"
    for split, paragraphs in splits.items():
        make(pieces / f"{split}.jsonl", write_paragraphs, pieces, split, paragraphs, cutter)
    return make(args.output / "bin", binarise_questions, args, task, list(splits), dictionary)


def write_paragraphs(folder: Path, split: str, paragraphs: Sequence[dict], cutter: Cutter) -> None:
    """Write SPLIT.question, SPLIT.paragraph and, at the end, SPLIT.jsonl."""
    if not any(paragraph["qas"] for paragraph in paragraphs):
        raise UserError(f"{folder.parent}: no questions for {split}. Add a file of this split.")
    files = [folder / f"{split}.{name}" for name in ("question", "paragraph", "jsonl")]
    with whole_file(files[2]) as index, whole_file(files[1]) as texts, whole_file(files[0]) as questions:
        for paragraph in paragraphs:
            text = paragraph["context"]
            spans = words(text)
            cut = [cutter.word(text[start:end]) for start, end in spans]
            texts.write(" ".join(piece for word in cut for piece in word) + "\n")
            asked = []
            for question in paragraph["qas"]:
                questions.write(cutter(question["question"], IN_PARAGRAPHS) + "\n")
                # 2.0 has plausible answers to questions without an answer; they do not count
                right = [] if question.get("is_impossible") else question["answers"]
                asked.append({"id": question["id"], "answers": [[one["answer_start"], one["text"]] for one in right]})
            line = {"text": text, "words": spans, "pieces": [len(word) for word in cut], "questions": asked}
            index.write(json.dumps(line, ensure_ascii=False) + "\n")


def binarise_questions(args: argparse.Namespace, task: QuestionTask, splits: Sequence[str], dictionary: Path) -> None:
    """Make the folder bin, which appears when it is complete."""
    with whole_folder(args.output / "bin") as made:
        for name in ("question", "paragraph"):
            files = {split: args.output / "bpe" / f"{split}.{name}" for split in splits}
            binarise_splits(args, made / name, files, dictionary)
        for split in splits:
            shutil.copyfile(args.output / "bpe" / f"{split}.jsonl", made / f"{split}.jsonl")
        write_task(made, task)


TASKS = {"1.1": QuestionTask("squad1.1"), "2.0": QuestionTask("squad2.0", unanswerable=True)}


def squad(args: argparse.Namespace) -> Path:
    """Prepare SQuAD 1.1 or 2.0 (Rajpurkar et al., 2016, 2018): the training part, and the development part for validation."""
    names = [f"{part}-v{args.version}.json" for part in ("train", "dev")]
    files = gather(args, names, {URL + name: None for name in names})
    splits = {split: list(read_paragraphs(path)) for split, path in zip(("train", "valid"), files, strict=True)}
    return write_question_data(args, TASKS[args.version], splits)


CORPUS = Corpus(
    name="squad",
    prepare=squad,
    arguments=(
        Argument(
            "--version", part="-{}", choices=tuple(TASKS), default="1.1", help="version of SQuAD (default: %(default)s)"
        ),
        PIECES_OF,
        BERT,
    ),
    smoke_corpus=lambda values: "xquad-unanswerable" if values["version"] == "2.0" else "xquad",
    training=lambda values: TASKS[values["version"]].training,
    download=46,
)
