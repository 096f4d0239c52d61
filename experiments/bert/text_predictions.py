"""Predictions for texts that are not prepared, by way of a small corpus in a temporary folder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fairseq.data import indexed_dataset

from experiments.bert.predictions import predict
from experiments.corpora.cutting import IN_PARAGRAPHS, load_cutter, words
from fairseq_lowrank.files import first_folder, say, write_lines
from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.tools.fairseq.checkpoints import configuration, load_state, read_dictionary

SPLIT = "text"


def predict_text(
    checkpoint: Path,
    lines: Sequence[str],
    *,
    dictionary: Path | None = None,
    pieces: Path | None = None,
    labels: Sequence[str] | None = None,
    unanswerable: bool = False,
    max_tokens: int = 8192,
) -> list[str]:
    """Return a label, a number or an answer for each line.

    Args:
        checkpoint: a model of `sentence_prediction` or `question_answering`.
        lines: a sentence, or two separated by a tab; for questions the question, a tab, and the paragraph.
        dictionary: `dict.txt` of the model (default: from the data that the model was trained on).
        pieces: see :func:`~experiments.corpora.cutting.load_cutter`.
        labels: names of the classes in their order (default: from the data that the model was trained on).
        unanswerable: if True, a question may have no answer; then the answer is empty.
        max_tokens: the greatest number of tokens of a batch.

    Raises:
        UserError: the checkpoint is of another task, or a file or the labels are missing.
    """
    if not lines:
        raise UserError("--text: there is no line. Give a text with a line for each prediction.")
    state = load_state(checkpoint)
    task = configuration(state, "task", "_name") or configuration(state, "task", "task")
    if task not in ("sentence_prediction", "question_answering"):
        raise UserError(f"{checkpoint}: trained with --task {task}. Use a model of sentences or questions.")
    asks_questions = task == "question_answering"
    predicts_numbers = not asks_questions and configuration(state, "task", "regression_target", False)
    if labels is not None and (asks_questions or predicts_numbers):
        said = "answers" if asks_questions else "numbers"
        raise FlagError("--labels", " ".join(labels), f"{checkpoint} predicts {said}", "Remove the flag.")
    if unanswerable and not asks_questions:
        raise UserError(f"--unanswerable: {checkpoint} answers no questions. Remove the flag.")
    data = first_folder(str(configuration(state, "task", "data")))
    dictionary = dictionary or data / ("question" if asks_questions else "input0") / "dict.txt"
    if not dictionary.is_file():
        raise UserError(f"the dictionary {dictionary} of {checkpoint} does not exist. Add --dict FILE.")
    rows, cutter = [line.split("\t") for line in lines], load_cutter(pieces)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asks_questions:
            check_columns(rows, 2, "a question, a tab, and a paragraph")
            about = {"name": SPLIT, "unanswerable": unanswerable}
            cut = [[cutter.word(text[start:end]) for start, end in words(text)] for _, text in rows]
            write(folder / "question", dictionary, [cutter(question, IN_PARAGRAPHS) for question, _ in rows])
            write(folder / "paragraph", dictionary, [" ".join(piece for word in one for piece in word) for one in cut])
            entries = [
                {
                    "text": text,
                    "words": words(text),
                    "pieces": [len(word) for word in one],
                    "questions": [{"id": str(number), "answers": []}],
                }
                for number, ((_, text), one) in enumerate(zip(rows, cut, strict=True))
            ]
            (folder / f"{SPLIT}.jsonl").write_text(
                "".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8"
            )
        else:
            check_columns(rows, *columns_of(data, rows))
            names = [] if predicts_numbers else class_names(state, data, labels)
            about = {"name": SPLIT, "labels": names, "measures": [], "server": None, "answers": None, "names": None}
            for column in range(len(rows[0])):
                write(folder / f"input{column}", dictionary, [cutter(row[column]) for row in rows])
            (folder / "label").mkdir()
            # only the number of classes counts: the names may repeat, or be symbols of fairseq
            write_lines(folder / "label" / "dict.txt", [f"{number} 1" for number in range(len(names))])
        (folder / "task.json").write_text(json.dumps(about), encoding="utf-8")
        found = predict(checkpoint, folder, [SPLIT], max_tokens)[SPLIT].files
    if asks_questions:
        answers = json.loads(found[f"{SPLIT}.json"])
        return [answers[str(number)] for number in range(len(rows))]
    return found[f"{SPLIT}.txt"].splitlines()


def columns_of(data: Path, rows: list[list[str]]) -> tuple[int, str]:
    """Return the number of sentences of a line, and words for it: as in the training data or, without it, the first line."""
    if not (data / "input0").is_dir():
        return min(len(rows[0]), 2), "as many sentences as the first line, 1 or 2"
    if (data / "input1").is_dir():
        return 2, "two sentences with a tab between them, as in the training data"
    return 1, "one sentence, as in the training data"


def check_columns(rows: list[list[str]], number: int, expected: str) -> None:
    for line, row in enumerate(rows, 1):
        if len(row) != number:
            raise UserError(f"--text: line {line} has {len(row)} columns. Give {expected}.")


def class_names(state: dict, data: Path, labels: Sequence[str] | None) -> list[str]:
    """Return the names of a model's classes: `labels`, or the names in the data that it was trained on."""
    number = configuration(state, "task", "num_classes")
    if labels is None:
        file = data / "label" / "dict.txt"
        if not file.is_file():
            raise UserError(
                f"the names of the {number} labels are unknown: {file} does not exist. Add --labels NAME NAME …."
            )
        known = read_dictionary(file)
        # fairseq-preprocess fills dictionaries up with made-up words
        labels = known.symbols[known.nspecial :][:number]
    if len(labels) != number:
        raise FlagError(
            "--labels", " ".join(labels), f"{len(labels)} names, and the model has {number} classes", f"Give {number}."
        )
    return list(labels)


def write(folder: Path, dictionary: Path, lines: list[str]) -> None:
    """Binarise lines as fairseq-preprocess does, and note on standard error how many tokens are unknown."""
    known = read_dictionary(dictionary)
    folder.mkdir()
    known.save(str(folder / "dict.txt"))
    builder = indexed_dataset.make_builder(str(folder / f"{SPLIT}.bin"), impl="mmap", vocab_size=len(known))
    tokens = unknown = 0
    for line in lines:
        encoded = known.encode_line(line, add_if_not_exist=False, append_eos=True)
        tokens, unknown = tokens + len(encoded) - 1, unknown + int((encoded == known.unk()).sum())
        builder.add_item(encoded)
    builder.finalize(str(folder / f"{SPLIT}.idx"))
    if 10 * unknown > tokens:
        say(f"{unknown} of {tokens} tokens are not in {dictionary}. Add the model's --pieces FILE.")
