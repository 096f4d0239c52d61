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
_LOADED = re.compile(r"Loaded checkpoint .* \(epoch \d+ @ (\d+) updates\)")
"""What it logs if it loads a checkpoint; a fine-tuning starts with 0 updates."""
# The last report of a line: in JSON, of an epoch, or of a subset without an epoch, as fairseq-validate logs it.
_REPORT = re.compile(
    r".*(?P<text>(?P<json>\{\"[^{}]*\})|epoch \d+ \| (?:valid on '(?P<subset>[^']+)' subset \| )?.*"
    r"|(?<!\d \| )valid on '(?P<alone>[^']+)' subset \| .*)"
)
# The fields that are read of a report; a line that was cut has fewer.
_FIELDS = {"train": {"epoch", "num_updates", "loss", "wpb", "train_wall"}, "valid": {"epoch", "num_updates", "loss"}}


def progress(line: str) -> tuple[str, dict[str, str]] | None:
    """Return the tag (train, train_inner, valid, …) and the fields of a line that reports progress, else None.

    The report has the format of `--log-format json`, or at an epoch's end that of `simple` and `tqdm`. Text before it does not
    count: date and level of fairseq or Hydra, nothing in a `--log-file`, or a line that was cut.
    """
    if (found := _REPORT.fullmatch(line.rstrip("\r\n"))) is None:
        return None
    text = found["text"]
    if found["json"] is None:
        tag = found["subset"] or found["alone"] or "train"
        return tag, dict(field.rsplit(" ", 1) for field in text.split(" | ") if " " in field)
    try:
        fields = json.loads(text)
    except ValueError:  # the line is not whole yet
        return None
    named = (name.removesuffix("_loss") for name in fields if name.endswith("_loss"))
    tag = "train_inner" if "loss" in fields else next(named, None)  # reports within an epoch name no subset
    return None if tag is None else (tag, {name.removeprefix(f"{tag}_"): str(value) for name, value in fields.items()})


def read_training_log(path: Path, subset: str = "valid") -> dict:
    """Read a fairseq-train log; the run may have been resumed.

    Args:
        subset: the validation set that is read, if `--valid-subset` has several, or another name.

    Returns:
        - `updates`: those of the last finished epoch, or of a later validation.
        - `tokens_per_second`: target tokens per second of training steps, without validation and saving; None if unknown. An epoch
          without the one before it in the log does not count, because its start is not known.
        - `valid_perplexity`: the best finite one of all validations, also within epochs; None if there was none.
        - `valid_loss`: its logarithm, the loss in bits per token without label smoothing.
        - `epochs`: a list with `updates`, `train_loss` and `valid_loss` (both in base 2) of each finished epoch. The validation loss
          is that of the epoch's end; None if there was none. A loss that is not a finite number is None too.

    Raises:
        UserError: the log has no finished epoch.
    """
    epochs: dict[int, dict[str, dict[str, str]]] = {}
    validations: dict[int, tuple[float, float]] = {}  # perplexity and loss by updates
    start = None  # updates before the first epoch
    for line in read_lines(path, errors="replace"):
        loaded = _LOADED.search(line)
        if loaded or FROM_SCRATCH in line:
            # what follows is from the loaded checkpoint on; an interrupted run repeats what came after it
            updates = int(loaded[1]) if loaded else 0
            start = updates if start is None else min(start, updates)
            epochs = {number: one for number, one in epochs.items() if _updates(one) <= updates}
            validations = {number: one for number, one in validations.items() if number <= updates}
        elif (found := progress(line)) and found[0] in ("train", subset):
            tag, fields = "valid" if found[0] == subset else "train", found[1]
            if not _FIELDS[tag] <= fields.keys():
                continue
            updates, current = int(fields["num_updates"]), int(fields["epoch"])
            # logs of other formats have no line on the checkpoint
            epochs = {number: one for number, one in epochs.items() if number <= current and _updates(one) <= updates}
            validations = {number: one for number, one in validations.items() if number <= updates}
            epochs.setdefault(current, {})[tag] = fields
            if tag == "valid":
                # perplexity is 2 to the power of this loss, which has no label smoothing
                loss = float(fields.get("nll_loss", fields["loss"])) if "ppl" in fields else math.nan
                validations[updates] = float(fields.get("ppl", "nan")), loss
    finished = {number: epoch for number, epoch in sorted(epochs.items()) if "train" in epoch}
    if not finished:
        raise UserError(
            f"{path} has no finished epoch. Give the log of a fairseq-train that finished one, without --log-format none."
        )
    before, tokens, seconds, curve = 0, 0.0, 0.0, []
    for number, epoch in finished.items():
        train, valid = epoch["train"], epoch.get("valid", {})
        updates = _updates(epoch)
        if number - 1 in finished or (number == 1 and not start):
            tokens += float(train["wpb"]) * (updates - before)
            seconds += float(train["train_wall"])
        before = updates
        at_end = valid.get("num_updates") == train["num_updates"]
        valid_loss = _least([float(valid["loss"])]) if at_end else None
        curve.append({"updates": updates, "train_loss": _least([float(train["loss"])]), "valid_loss": valid_loss})
    return {
        "updates": max([before, *validations]),
        "tokens_per_second": round(tokens / seconds) if seconds else None,
        "valid_perplexity": _least(perplexity for perplexity, _ in validations.values()),
        "valid_loss": _least(loss for _, loss in validations.values()),
        "epochs": curve,
    }


def _updates(epoch: Mapping[str, Mapping[str, str]]) -> int:
    """Return the updates at the last report of an epoch's training, or of its validation."""
    return int((epoch.get("train") or epoch["valid"])["num_updates"])


def _least(values: Iterable[float]) -> float | None:
    return min(filter(math.isfinite, values), default=None)
