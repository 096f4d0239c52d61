"""Predictions of a fine-tuned model for a split of a prepared corpus: labels, numbers or answers, and their scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from experiments.bert.squad import evaluate
from experiments.bert.task_scores import measure
from fairseq_lowrank.files import read_json
from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.progress import tracked
from fairseq_lowrank.tasks.question_answering import QuestionDataset, span_scores
from fairseq_lowrank.tasks.spans import SubwordOffsets
from fairseq_lowrank.tools.fairseq.checkpoints import configuration, load_model, load_state


@dataclass
class Predictions:
    """Predictions of one split.

    Args:
        name: the name of the score in tables.
        files: the text of each file of predictions, by the file's name.
        measures: the measures in percent; empty if the targets are not known.
        score: the mean of the task's measures, or F1 of answers.
    """

    name: str
    files: dict[str, str]
    measures: dict[str, float]
    score: float | None = None


def predict(checkpoint: Path, data: Path, splits: list[str], max_tokens: int) -> dict[str, Predictions]:
    """Return the predictions of a checkpoint's model for each split of a prepared corpus.

    Args:
        checkpoint: a checkpoint of a fine-tuned model.
        data: the folder `bin` of the corpus.
        splits: valid, test, … .
        max_tokens: the greatest number of tokens of a batch.

    Raises:
        UserError: the checkpoint is of another task, or a split does not exist.
    """
    about = read_task(data)
    asks = "question_answering" if "unanswerable" in about else "sentence_prediction"
    check_task(load_state(checkpoint), checkpoint, asks, about, data)
    model, task = load_model(checkpoint, data=data)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    found = {}
    for split in splits:
        try:
            task.load_dataset(split)
        except (FileNotFoundError, AssertionError) as error:
            raise FlagError("--subset", split, f"{data} has no such subset ({error})", "Choose another one.") from error
        answer = predict_answers if asks == "question_answering" else predict_sentences
        with torch.inference_mode():
            found[split] = answer(model, task, split, about, max_tokens)
    return found


def read_task(folder: Path) -> dict:
    """Return the content of bin/task.json of a prepared corpus.

    Raises:
        UserError: the folder has no such file.
    """
    file = folder / "task.json"
    if not file.is_file():
        raise UserError(f"{folder} has no task.json. Give the folder `bin` of a corpus of sentences or questions.")
    return read_json(file)


def check_task(state: dict, checkpoint: Path, asks: str, about: dict, data: Path) -> None:
    """Refuse a model that was trained for another task, or for other labels than those of the data.

    Raises:
        UserError: the model was trained for something else.
    """
    if (trained := configuration(state, "task", "_name") or configuration(state, "task", "task")) != asks:
        raise UserError(f"{checkpoint} was trained with --task {trained}. Use a model of --task {asks} for {data}.")
    if asks == "question_answering":
        return

    def outputs(numbers: bool, classes: int) -> str:
        return "numbers" if numbers else f"{classes} labels"

    theirs = outputs(
        configuration(state, "task", "regression_target", False), configuration(state, "task", "num_classes")
    )
    if theirs != (wanted := outputs(not about["labels"], len(about["labels"] or ()))):
        raise UserError(f"{checkpoint} predicts {theirs}, and {data} has {wanted}. Use a model that was trained on it.")


def batches(model, task, split: str, max_tokens: int) -> Iterator[dict]:
    """Yield the samples of a split, on the model's device.

    Raises:
        UserError: a text is too long for the model, or for a batch.
    """
    from fairseq.utils import move_to_cuda

    dataset = task.dataset(split)
    indices = dataset.ordered_indices()
    _, too_long = dataset.filter_indices_by_size(indices, task.max_positions())
    for index in too_long:
        raise FlagError(
            "--subset",
            split,
            f"text {index + 1} has {dataset.size(index)} tokens, and the model accepts {task.max_positions()}",
            "Shorten it.",
        )
    longest = max(indices, key=dataset.num_tokens)
    if (tokens := dataset.num_tokens(longest)) > max_tokens:
        raise FlagError(
            "--max-tokens", max_tokens, f"text {longest + 1} of {split} has {tokens}", f"Use {tokens} or more."
        )
    iterator = task.get_batch_iterator(task.dataset(split), max_tokens=max_tokens, max_positions=task.max_positions())
    on_gpu = next(model.parameters()).is_cuda
    for sample in tracked(iterator.next_epoch_itr(shuffle=False), f"predicting {split}", "batches", len(iterator)):
        yield move_to_cuda(sample) if on_gpu else sample


def predict_sentences(model, task, split: str, about: dict, max_tokens: int) -> Predictions:
    """Predict each sentence's most probable label, or its number."""
    labels, head = about["labels"], task.cfg.classification_head_name
    said: dict = {}
    targets: dict = {}
    for sample in batches(model, task, split, max_tokens):
        scores, _ = model(**sample["net_input"], features_only=True, classification_head_name=head)
        values = scores.argmax(dim=-1) if labels else scores.view(-1).float()
        known = sample["target"].view(-1).tolist() if "target" in sample else []
        numbers = sample["id"].tolist()
        said |= zip(numbers, values.tolist(), strict=True)
        targets |= zip(numbers, known, strict=False)
    spell: Callable = labels.__getitem__ if labels else float
    predictions = [spell(said[number]) for number in sorted(said)]
    right = [spell(targets[number]) for number in sorted(targets)]
    name = (about["names"] or {}).get(split, about["name"])
    files = {f"{split}.txt": "".join(f"{one}\n" for one in predictions)}
    if file := (about["server"] or {}).get(split):
        files[file] = server_file(file, predictions, about["answers"] or {})
    measures = measure(about["measures"], predictions, right) if right else {}
    return Predictions(name, files, measures, fmean(measures.values()) if measures else None)


def server_file(name: str, predictions: list, spelt: dict[str, str]) -> str:
    """Return the text of a file for a benchmark's server: GLUE's tab-separated columns, or SuperGLUE's JSON lines.

    The ending of the name decides. Numbers are limited to 0 to 5, for STS-B.
    """
    answers = [
        f"{min(max(one, 0.0), 5.0):.3f}" if isinstance(one, float) else spelt.get(one, one) for one in predictions
    ]
    if name.endswith(".jsonl"):
        return "".join(json.dumps({"idx": index, "label": answer}) + "\n" for index, answer in enumerate(answers))
    return "index\tprediction\n" + "".join(f"{index}\t{answer}\n" for index, answer in enumerate(answers))


def predict_answers(model, task, split: str, about: dict, max_tokens: int) -> Predictions:
    """Predict the span with the highest score in each question's windows, in the words of the paragraph.

    If the task has questions without an answer, there is no answer if the lowest score of `<s>` in all windows is higher.
    """
    dataset: QuestionDataset = task.dataset(split)
    places: dict[int, list[int]] = {}
    for index, window in enumerate(dataset.windows):
        places.setdefault(window.question, []).append(index)
    begins: dict = {}
    for indices in places.values():
        spans = [(dataset.windows[index].begin, dataset.windows[index].end) for index in indices]
        begins |= zip(indices, has_most_context(spans), strict=True)
    none: dict[int, float] = {}
    best: dict[int, tuple[float, int, int]] = {}
    for sample in batches(model, task, split, max_tokens):
        scores = span_scores(model, sample, task.dictionary.pad()).cpu()
        for index, row in zip(sample["id"].tolist(), scores, strict=True):
            window = dataset.windows[index]
            none[window.question] = min(float(row[0].sum()), none.get(window.question, float("inf")))
            first = dataset.first(window)
            start, end = row[first : first + window.end - window.begin].unbind(dim=-1)
            span = best_span(start, end, torch.tensor(begins[index], dtype=torch.bool), task.cfg.max_answer_length)
            if span and span[0] > best.get(window.question, (float("-inf"),))[0]:
                best[window.question] = span[0], window.begin + span[1], window.begin + span[2]
    predictions, answers = {}, {}
    for number, (place, question) in enumerate(dataset.asked):
        score, first, last = best.get(number, (float("-inf"), 0, 0))
        answered = score > none[number] if about["unanswerable"] else number in best
        text = ""
        if answered:
            line = dataset.lines[place]
            start, end = SubwordOffsets(line["words"], line["pieces"]).characters(first, last)
            text = line["text"][start:end]
        predictions[question["id"]] = text
        answers[question["id"]] = [text for _, text in question["answers"]]
    measures = evaluate(predictions, answers, unanswerable=about["unanswerable"])
    files = {f"{split}.json": json.dumps(predictions, ensure_ascii=False, indent=1) + "\n"}
    return Predictions(about["name"], files, measures, measures["f1"])


def has_most_context(spans: Sequence[tuple[int, int]]) -> list[list[bool]]:
    """Return for each subword of each window True if no other window gives the subword more context.

    The context is the smaller of the numbers of subwords before and after it, plus a hundredth of the window's length, as in
    BERT's code.
    """

    def context(span: tuple[int, int], piece: int) -> float:
        return min(piece - span[0], span[1] - 1 - piece) + 0.01 * (span[1] - span[0])

    best: dict[int, tuple[float, int]] = {}
    for number, span in enumerate(spans):
        for piece in range(*span):
            score = context(span, piece)
            if piece not in best or score > best[piece][0]:
                best[piece] = score, number
    return [[best[piece][1] == number for piece in range(*span)] for number, span in enumerate(spans)]


def best_span(start: Tensor, end: Tensor, begins: Tensor, longest: int) -> tuple[float, int, int] | None:
    """Return score, first and last subword of the span with the highest start + end score; None if no span is allowed.

    Args:
        start, end: scores of each subword, [T].
        begins: True for subwords at which a span may begin, [T].
        longest: the greatest number of subwords of a span.
    """
    if not begins.any():
        return None
    size = len(start)
    scores = start[:, None] + end[None, :]
    allowed = torch.ones(size, size, dtype=torch.bool, device=start.device).triu().tril(longest - 1) & begins[:, None]
    place = int(scores.masked_fill(~allowed, float("-inf")).argmax())
    first, last = divmod(place, size)
    return float(scores[first, last]), first, last
