"""Lines of results: one JSON object for each finished run. Broken lines are skipped; a new line is appended completely."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from fairseq_lowrank.files import read_lines, say
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.tools.locks import locked
from fairseq_lowrank.tools.reporting.sentences import add_sentences, append_sentences, take_sentences

Number, Text = (int, float), (str,)
# Every line has these fields, of these types.
FIELDS: dict[str, tuple[type, ...]] = {
    **{"paper": Text, "table": (str, int), "row": Text, "architecture": Text, "flags": (str, list), "seed": (int,)},
    **{"updates": Number, "parameters": Number, "metric": Text, "value": Number, "split": Text},
    **{"tokens_per_second": (*Number, type(None)), "versions": (dict,), "smoke": (bool,), "date": Text},
}
# Some lines have these fields; trainings of recipes have all of them. New lines have a commit, older ones do not.
OPTIONAL: dict[str, tuple[type, ...]] = {
    **{"commit": (*Text, type(None)), "machine": (dict, str), "log": Text, "curve": (list,)},
    **dict.fromkeys(("attention_parameters", "tokens", "tokenised_bleu"), (*Number, type(None))),
    **dict.fromkeys(
        ("valid_tokenised_bleu", "valid_perplexity", "valid_loss", "next_sentence_accuracy"), (*Number, type(None))
    ),
    **{"alone": (bool,), "position": (int,), "losses": (dict,), "task": Text, "corpus": Text, "scoring": Text},
    **{"pretraining": (dict,), "scores": (dict,), "measures": (dict,), "earlier_starts": (list,), "patches": (dict,)},
    "sentences": (int,),
}
# A measurement without a training has these fields, and no architecture.
MEASURED = {field: FIELDS[field] for field in ("paper", "table", "row", "seed", "metric", "value", "smoke")}
MEASURED["commit"] = OPTIONAL["commit"]
# A line of `record` has no paper. Reports read it as a row of a table with the name of its file.
RECORDED = "recorded"
UNKNOWN = {
    "architecture": "",
    "flags": [],
    "updates": 0,
    "parameters": None,
    "split": "test",
    "tokens_per_second": None,
}
UNKNOWN |= {"versions": {}, "smoke": False, "date": ""}
# A score to compare has at least these fields.
SCORED = {field: FIELDS[field] for field in ("row", "seed", "metric", "value")}
# A sentence's counts for BLEU: lengths of hypothesis and reference, matching and all n-grams of orders 1 to 4.
COUNTS = 10
POINT: dict[str, tuple[type, ...]] = {"updates": Number, "train_loss": Number, "valid_loss": (*Number, type(None))}
ORIGIN: dict[str, tuple[type, ...]] = {
    "commit": OPTIONAL["commit"],
    "machine": OPTIONAL["machine"],
    "versions": FIELDS["versions"],
}
LOSS: dict[str, tuple[type, ...]] = {"bits": Number}
TYPES = {str: "a text", int: "a number", list: "a list", dict: "an object", bool: "true or false"}


def results_files(paths: Iterable[Path]) -> list[Path]:
    """Return the ``.jsonl`` files among the paths, and those in folders.

    Raises:
        UserError: a path does not exist, or a folder has no such file.
    """
    found = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist. Give a results file, or a folder of them.")
        files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{path} has no .jsonl file. Give a results file, or a folder of them.")
        found += files
    return found


def origins(line: dict) -> list[dict]:
    """Return dicts with `commit`, `machine` and `versions`: the line itself, and the earlier starts that it continued."""
    return [line, *line.get("earlier_starts", [])]


def read_results(
    path: Path,
    complain: Callable[[str], None] = say,
    *,
    measurements: bool = False,
    scores: bool = False,
    recorded: bool = False,
    sentences: bool = False,
) -> list[dict]:
    """Return the trainings in a results file; empty if the file does not exist.

    A broken line is left out, after a call of `complain` with its number and fault. A measurement of a model, without a row, is
    left out too. A measurement without a training (it has no
    architecture) is left out unless `measurements` is true. With `scores`, every line with a row, a seed, a metric and a value is
    used. With `recorded`, the lines of `record` are completed as lines of a paper called "recorded". With `sentences`, lines have
    the values of their sentences, see :func:`~fairseq_lowrank.tools.reporting.sentences.add_sentences`.
    """
    lines = []
    for number, text in enumerate(read_lines(path) if path.exists() else (), start=1):
        try:
            line = json.loads(text)
            if isinstance(line, dict) and "model" in line and "row" not in line:
                continue  # what `fairseq-lowrank measure` found in a model, which is no score of a row
            if scores:
                check(line, text, SCORED)
                lines.append(line)
                continue
            if recorded and isinstance(line, dict) and "paper" not in line:
                check(line, text, SCORED)
                lines.append(UNKNOWN | {"paper": RECORDED, "table": path.stem} | line)
                continue
            measured = isinstance(line, dict) and "architecture" not in line and "commit" in line
            if measured and not measurements:
                continue
            check_measurement(line) if measured else check(line, text)
        except (ValueError, RecursionError) as error:
            wrong = f"not JSON ({error})" if isinstance(error, (json.JSONDecodeError, RecursionError)) else error
            complain(f"{path}, line {number}: {wrong}")
        else:
            lines.append(line)
    if sentences:
        add_sentences(path, lines, complain)
    return lines


def check(line: object, text: str = "", required: Iterable[str] = FIELDS) -> None:
    """Raise UserError unless `line` is a result with the required fields."""
    if not isinstance(line, dict):
        raise UserError(f"{text[:40]} is not a result, expected a JSON object")
    if missing := [field for field in required if field not in line]:
        raise UserError(f"has no {', '.join(missing)}. Add what is missing.")
    for field, kinds in (FIELDS | OPTIONAL).items():
        if field in line:
            check_type(field, line[field], kinds)
    for point in line.get("curve") or []:
        check_fields("curve", point, POINT)
    for start in line.get("earlier_starts", []):
        check_fields("earlier_starts", start, ORIGIN)
    for metric, value in line.get("scores", {}).items():
        check_type(f"score {metric}", value, Number)
    check_sentences(line)


def check_sentences(line: dict) -> None:
    """Raise UserError unless a line's values of sentences are numbers."""
    check_type("losses", line.get("losses", {}), (dict,))
    for split, loss in line.get("losses", {}).items():
        check_fields(f"losses of {split}", loss, LOSS)
        check_type(f"sentence_values of {split}", loss.get("sentence_values", []), (list,))
        for value in loss.get("sentence_values", []):
            check_type(f"a sentence's loss of {split}", value, Number)
    check_type("sentence_values", line.get("sentence_values", []), (list,))
    for value in line.get("sentence_values", []):
        check_type("a sentence's value", value, Number)
    check_type("sentence_counts", line.get("sentence_counts", []), (list,))
    for counts in line.get("sentence_counts", []):
        if not isinstance(counts, list) or len(counts) != COUNTS or not all(isinstance(one, int) for one in counts):
            raise UserError(f"a sentence's counts are {json.dumps(counts)[:40]}, expected {COUNTS} whole numbers")


def check_measurement(line: dict) -> None:
    """Raise UserError unless `line` is a measurement."""
    if missing := [field for field in MEASURED if field not in line]:
        raise UserError(f"has no {', '.join(missing)}. Add what is missing.")
    for field, kinds in MEASURED.items():
        check_type(field, line[field], kinds)
    check_sentences(line)


def check_fields(name: str, value: object, fields: dict[str, tuple[type, ...]]) -> None:
    """Raise UserError unless `value` is an object with all of the fields, of these types."""
    if not isinstance(value, dict) or not fields.keys() <= value.keys():
        raise UserError(f"{name} has {json.dumps(value)[:40]}, expected {', '.join(fields)}")
    for field, kinds in fields.items():
        check_type(f"{name}'s {field}", value[field], kinds)


def check_type(field: str, value: object, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = list(dict.fromkeys(TYPES[kind] for kind in kinds if kind in TYPES))
        raise UserError(f"{field} is {json.dumps(value)[:40]}, expected {' or '.join(expected)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{field} is {value}, expected a finite number")


def append_result(path: Path, line: dict) -> None:
    """Append one line, completely or not at all; several processes may append at the same time.

    Values of sentences go to the compressed file next to it, see :mod:`~fairseq_lowrank.tools.reporting.sentences`. If the last line has no end, because a process was killed, it is ended first.

    Raises:
        UserError: a field is missing, has a wrong type, or is not finite.
    """
    if missing := [field for field in (*FIELDS, "commit") if field not in line]:
        raise UserError(f"the result has no {', '.join(missing)}. Add what is missing.")
    check(line)
    _append(path, line)


def append_measurement(path: Path, line: dict) -> None:
    """Append the line of a measurement without a training, like :func:`append_result`.

    Raises:
        UserError: a field is missing, has a wrong type, or is not finite.
    """
    check_measurement(line)
    _append(path, line)


def append_score(path: Path, line: dict) -> None:
    """Append a line that has a row, a seed, a metric and a value, as :func:`append_result` does.

    Raises:
        UserError: the line lacks a field or a field is of a wrong type, or the file already has the same score.
    """
    try:
        check(line, required=SCORED)
    except ValueError as error:
        raise UserError(f"row {line.get('row')}, seed {line.get('seed')}: {error}") from error
    same = ("row", "seed", "metric", "split", "table")
    if any(all(line.get(name) == other.get(name) for name in same) for other in read_results(path, scores=True)):
        raise UserError(
            f"{path}: already has {line['metric']} of row {line['row']}, seed {line['seed']}. Delete that line to replace it."
        )
    _append(path, line)


def check_writable(path: Path) -> None:
    """Check that a results file can be opened for appending, before a run starts.

    Raises:
        UserError: the file cannot be opened.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab"):
            pass
    except OSError as error:
        raise UserError(
            f"RESULTS {path}: cannot be opened for appending ({error.strerror}). Give a file that you can write."
        ) from error


def _append(path: Path, line: dict) -> None:
    line, record = take_sentences(line)
    data = (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as handle:
        assert handle is not None  # it waits for other processes
        if record:
            append_sentences(path, [record])
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            data = b"\n" + data
        try:
            if os.write(handle, data) < len(data):
                raise OSError(f"{path}: the disk is full. Free some space.")
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, size)
            raise
