"""Sentences, and pairs of sentences, with a label or a number, in fairseq's format for ``sentence_prediction``.

input0/ input1/     dict.txt and the binarised sentences of each split
label/              dict.txt and the binarised labels; SPLIT.label if they are numbers
task.json           :class:`SentenceTask`
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.corpora.fetch import make
from experiments.corpora.pieces import load_cutter_and_dictionary
from experiments.corpora.steps import check_settings, preprocess
from experiments.corpora.text import map_lines
from fairseq_lowrank.files import whole_folder, write_lines
from fairseq_lowrank.messages import UserError


@dataclass(frozen=True)
class SentenceTask:
    """A task on sentences.

    Args:
        name: the task's name in tables.
        labels: the labels in the order of the model's classes; empty if the target is a number.
        measures: names in :data:`experiments.bert.task_scores.MEASURES`; their mean is the task's score, as in GLUE.
        server: for each split without labels, the name of the file for the benchmark's server.
        answers: the labels in that file, if they differ.
        names: the names of splits' scores, if they differ from `name`.
    """

    name: str
    labels: tuple[str, ...] = ()
    measures: tuple[str, ...] = ("accuracy",)
    server: Mapping[str, str] | None = None
    answers: Mapping[str, str] | None = None
    names: Mapping[str, str] | None = None

    @property
    def training(self) -> list[str]:
        """Return fairseq-train's flags; the best checkpoint has the best accuracy, or the best loss for numbers."""
        flags = ["--task", "sentence_prediction", "--criterion", "sentence_prediction", "--init-token", "0"]
        flags += ["--num-classes", str(len(self.labels) or 1), "--shorten-method", "truncate"]
        if not self.labels:
            return [*flags, "--regression-target", "--best-checkpoint-metric", "loss"]
        return [*flags, "--best-checkpoint-metric", "accuracy", "--maximize-best-checkpoint-metric"]


@dataclass(frozen=True)
class Example:
    """One or two sentences, and their label if it is known."""

    sentences: tuple[str, ...]
    label: str | None = None


def write_task_data(args: argparse.Namespace, task: SentenceTask, splits: Mapping[str, Iterable[Example]]) -> Path:
    """Write the splits as text, as subwords, and binarised in fairseq's format; return the folder of the binary files.

    Raises:
        UserError: a label is not one of the task's.
    """
    check_settings(args, keep=True)
    cutter, dictionary = load_cutter_and_dictionary(args)
    raw = args.output / "raw"
    for split, examples in splits.items():
        make(raw / f"{split}.written", write_examples, raw, split, task, examples)
    files = {name: {split: raw / f"{split}.{name}" for split in splits} for name in ("input0", "input1", "label")}
    files = {name: {split: path for split, path in paths.items() if path.exists()} for name, paths in files.items()}
    for name in ("input0", "input1"):
        for split, path in files[name].items():
            files[name][split] = make(
                args.output / "bpe" / path.name, map_lines, cutter, path, args.output / "bpe" / path.name, args.workers
            )
    labels = args.output / "labels.txt"
    make(labels, write_lines, labels, [f"{label} 1" for label in task.labels])
    dictionaries = {"input0": dictionary, "input1": dictionary, "label": labels}
    return make(args.output / "bin", binarise_fields, args, files, dictionaries, task)


def write_examples(raw: Path, split: str, task: SentenceTask, examples: Iterable[Example]) -> None:
    """Write raw/SPLIT.input0, .input1 and .label with one line per example, and raw/SPLIT.written at the end."""
    examples = list(examples)
    if not examples:
        raise UserError(f"{raw.parent}: no examples for {split}. Add a file of this split.")
    for example in examples:
        if example.label is not None:
            check_label(task, example.label)
    columns = {
        f"input{index}": [one.sentences[index] for one in examples] for index in range(len(examples[0].sentences))
    }
    if examples[0].label is not None:
        columns["label"] = [one.label for one in examples]
    for name, column in columns.items():
        write_lines(raw / f"{split}.{name}", (" ".join(text.split()) for text in column))
    write_lines(raw / f"{split}.written", [str(len(examples))])


def check_label(task: SentenceTask, label: str) -> None:
    if task.labels and label not in task.labels:
        raise UserError(
            f"{task.name}: the label {label!r} is not one of {', '.join(task.labels)}. Download the data again."
        )
    try:
        if not task.labels:
            float(label)
    except ValueError as error:
        raise UserError(f"{task.name}: the label {label!r} is not a number. Download the data again.") from error


def binarise_fields(
    args: argparse.Namespace, files: Mapping[str, Mapping[str, Path]], dictionaries: Mapping[str, Path], task: object
) -> None:
    """Binarise each field's splits into bin/FIELD and write bin/task.json; bin appears when it is complete."""
    with whole_folder(args.output / "bin") as made:
        for name, paths in files.items():
            if paths and name == "label" and not task.labels:
                (made / name).mkdir()
                for split, path in paths.items():
                    shutil.copyfile(path, made / name / f"{split}.label")
            elif paths:
                binarise_splits(args, made / name, paths, dictionaries[name])
        write_task(made, task)


def write_task(folder: Path, task: object) -> None:
    """Write the dataclass of a task to folder/task.json."""
    (folder / "task.json").write_text(json.dumps(asdict(task), ensure_ascii=False, indent=1), encoding="utf-8")


def binarise_splits(args: argparse.Namespace, folder: Path, splits: Mapping[str, Path], dictionary: Path) -> None:
    """Binarise a file of text for each split; in fairseq's names, second parts are valid1 and test1."""
    groups = {kind: [str(splits[s]) for s in splits if s.rstrip("1") == kind] for kind in ("train", "valid", "test")}
    prefixes = [f"--{kind}pref={','.join(group)}" for kind, group in groups.items() if group]
    preprocess(folder, "--only-source", f"--srcdict={dictionary}", f"--workers={args.workers}", *prefixes)
