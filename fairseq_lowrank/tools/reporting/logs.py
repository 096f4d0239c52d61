"""The progress that fairseq's commands log, and the learning curve of a training log."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from fairseq_lowrank.files import read_lines
from fairseq_lowrank.messages import UserError

START = "loading model(s) from"
"""What the other commands log when they start to run."""
FROM_SCRATCH = "No existing checkpoint found"
"""What fairseq-train logs if it does not resume."""


def progress(line: str) -> tuple[str, dict[str, str]] | None:
    """Return the tag (train, train_inner, valid, …) and the fields of a line that reports progress, else None.

    The line has the format of `--log-format json`, or of `simple` at an epoch's end: fairseq's default, and that of older results.
    """
    parts = line.rstrip("\n").split(" | ", 3)  # date, level, tag, text
    if len(parts) < 4:
        return None
    tag, text = parts[2:]
    if text.startswith('{"'):
        try:
            fields = json.loads(text)
        except ValueError:  # the line is not whole yet
            return None
        return tag, {name.removeprefix(f"{tag}_"): str(value) for name, value in fields.items()}
    if text.startswith("epoch ") and " | " in text:
        return tag, dict(field.rsplit(" ", 1) for field in text.split(" | "))
    return None


def batches(line: str) -> tuple[int, int] | None:
    """Return the number of batches that are done and their total, from a line that fairseq or `predict` prints, else None."""
    fairseq = (
        r"(?:.* \| INFO \| |INFO:)fairseq\.logging\.progress_bar(?: \| |:):"  # with fairseq's format, or logging's own
    )
    found = re.match(rf"(?:{fairseq}|[\w ]+:)\s+([\d,]+) (?:/|of) ([\d,]+) ", line)
    return (int(found[1].replace(",", "")), int(found[2].replace(",", ""))) if found else None


def summary(tag: str, fields: Mapping[str, str]) -> str:
    """Return a report of progress as one short line."""
    shown = [f"{name} {fields[name]}" for name in ("loss", "ppl", "wps", "num_updates") if name in fields]
    return " | ".join([f"{tag} | epoch {fields.get('epoch', '?')}", *shown])


def read_training_log(path: Path) -> dict:
    """Read a fairseq-train log; the run may have been resumed.

    Returns:
        - `updates`.
        - `tokens_per_second`: target tokens per second of training steps, without validation and saving.
        - `valid_perplexity`: the best of all validations, also within epochs; None if there was none.
        - `valid_loss`: its logarithm, the loss in bits per token without label smoothing.
        - `epochs`: a list with `updates`, `train_loss` and `valid_loss` (both in base 2) of each finished epoch.

    Raises:
        UserError: the log has no finished epoch.
    """
    epochs: dict[int, dict[str, dict[str, str]]] = {}
    validations: dict[int, tuple[float, float]] = {}  # perplexity and loss by updates
    for line in read_lines(path):
        if FROM_SCRATCH in line:  # what is before it in the log is another training
            epochs, validations = {}, {}
        elif (found := progress(line)) and found[0] in ("train", "valid"):
            tag, fields = found
            updates = int(fields["num_updates"])
            # a run that was interrupted repeats what came after its checkpoint
            epochs = {
                number: one for number, one in epochs.items() if int(one.get("train", fields)["num_updates"]) <= updates
            }
            validations = {number: one for number, one in validations.items() if number <= updates}
            epochs.setdefault(int(fields["epoch"]), {})[tag] = fields
            if tag == "valid":
                # perplexity is 2 to the power of this loss, which has no label smoothing
                loss = float(fields.get("nll_loss", fields["loss"])) if "ppl" in fields else math.nan
                validations[updates] = float(fields.get("ppl", "nan")), loss
    finished = [epoch for _, epoch in sorted(epochs.items()) if "train" in epoch]
    if not finished:
        raise UserError(f"{path} has no finished epoch. Give the log of a fairseq-train that finished one.")
    before, tokens, seconds, curve = 0, 0.0, 0.0, []
    for epoch in finished:
        train, valid = epoch["train"], epoch.get("valid", {})
        updates = int(train["num_updates"])
        tokens += float(train["wpb"]) * (updates - before)
        seconds += float(train["train_wall"])
        before = updates
        valid_loss = float(valid["loss"]) if "loss" in valid else None
        curve.append({"updates": updates, "train_loss": float(train["loss"]), "valid_loss": valid_loss})
    return {
        "updates": before,
        "tokens_per_second": round(tokens / max(seconds, 1.0)),
        "valid_perplexity": _least(perplexity for perplexity, _ in validations.values()),
        "valid_loss": _least(loss for _, loss in validations.values()),
        "epochs": curve,
    }


def _least(values: Iterable[float]) -> float | None:
    return min((value for value in values if not math.isnan(value)), default=None)


def read_validation(path: Path) -> dict:
    """Read the scores of the test set in a fairseq-validate log.

    Raises:
        UserError: the log has no perplexity.
    """
    fields: dict[str, str] = {}
    for line in read_lines(path):
        if START in line:  # another run
            fields = {}
        elif (found := progress(line)) and found[0] == "test":
            fields = found[1]
    if "ppl" not in fields:
        raise UserError(f"{path} has no perplexity. Give the log of fairseq-validate.")
    accuracy = {"next_sentence_accuracy": float(fields["nsp_accuracy"])} if "nsp_accuracy" in fields else {}
    return {"metric": "perplexity", "value": float(fields["ppl"]), **accuracy}
