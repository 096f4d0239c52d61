"""Lines of results: one JSON object for each finished run. Broken lines are skipped; a new line is appended completely."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from fairseq_lowrank.files import named_if_full, read_lines, regular_file, say
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.records import schema
from fairseq_lowrank.records.locks import append_whole, locked
from fairseq_lowrank.records.schema import MEASUREMENT, TRAINING, Line
from fairseq_lowrank.records.sentences import add_sentences, append_sentences, take_sentences

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
# A sentence's counts for BLEU: lengths of hypothesis and reference, matching and all n-grams of orders 1 to 4.
COUNTS = 10


def results_files(paths: Iterable[Path]) -> list[Path]:
    """Return the ``.jsonl`` and ``.jsonl.gz`` files among the paths, and those in folders.

    Raises:
        UserError: a path does not exist, or a folder has no such file.
    """
    found = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist. Give a results file, or a folder of them.")
        files = sorted([*path.rglob("*.jsonl"), *path.rglob("*.jsonl.gz")]) if path.is_dir() else [path]
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
    the values of their sentences, see :func:`~fairseq_lowrank.records.sentences.add_sentences`.
    """
    lines = []
    for number, text in enumerate(read_lines(path) if path.exists() else (), start=1):
        try:
            line = json.loads(text)
            if isinstance(line, dict) and "model" in line and "row" not in line:
                continue  # what `fairseq-lowrank measure` found in a model, which is no score of a row
            if scores:
                check(line, ())
                lines.append(line)
                continue
            if recorded and isinstance(line, dict) and "paper" not in line:
                check(line, ())
                lines.append(UNKNOWN | {"paper": RECORDED, "table": path.stem} | line)
                continue
            measured = isinstance(line, dict) and "architecture" not in line and {"paper", "commit"} <= line.keys()
            if measured and not measurements:
                continue
            check(line, MEASUREMENT if measured else TRAINING)
        except (ValueError, RecursionError) as error:
            wrong = f"not JSON ({error})" if isinstance(error, (json.JSONDecodeError, RecursionError)) else error
            complain(f"{path}, line {number}: {wrong}")
        else:
            lines.append(line)
    if sentences:
        add_sentences(path, lines, complain)
    return lines


def check(line: object, needed: Iterable[str] = TRAINING) -> None:
    """Raise UserError unless `line` is a score with the needed fields."""
    if not isinstance(line, dict):
        raise UserError(f"{json.dumps(line)[:40]} is not a result, expected a JSON object")
    if missing := [field for field in (*schema.required(Line), *needed) if field not in line]:
        raise UserError(f"has no {', '.join(missing)}. Add what is missing.")
    schema.check(line, Line)
    for counts in line.get("sentence_counts", []):
        if len(counts) != COUNTS:
            raise UserError(f"a sentence's counts are {json.dumps(counts)[:40]}, expected {COUNTS} whole numbers")


def append_result(path: Path, line: dict) -> None:
    """Append one line, completely or not at all; several processes may append at the same time.

    Values of sentences go to the compressed file next to it, see :mod:`~fairseq_lowrank.records.sentences`. If the last line has no end, because a process was killed, it is ended first.

    Raises:
        UserError: a field is missing, has a wrong type, or is not finite.
    """
    check(line, (*TRAINING, "commit"))
    append_line(path, line)


def append_measurement(path: Path, line: dict) -> None:
    """Append the line of a measurement without a training, like :func:`append_result`.

    Raises:
        UserError: a field is missing, has a wrong type, or is not finite.
    """
    check(line, MEASUREMENT)
    append_line(path, line)


def append_score(path: Path, line: dict) -> None:
    """Append a line that has a row, a seed, a metric and a value, as :func:`append_result` does.

    Raises:
        UserError: the line lacks a field or a field is of a wrong type, or the file already has the same score.
    """
    try:
        check(line, ())
    except ValueError as error:
        raise UserError(f"row {line.get('row')}, seed {line.get('seed')}: {error}") from error

    def refuse_twice() -> None:
        same = ("row", "seed", "metric", "split", "table")
        if any(all(line.get(name) == other.get(name) for name in same) for other in read_results(path, scores=True)):
            raise UserError(
                f"{path}: already has {line['metric']} of row {line['row']}, seed {line['seed']}. Delete that line to replace it, or name another table or split."
            )

    append_line(path, line, refuse_twice)


def check_writable(path: Path) -> None:
    """Check that a results file can be opened for appending, before a run starts. No file is made.

    Raises:
        UserError: the file cannot be opened, or is no regular file.
    """
    real = regular_file(path)
    try:
        real.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{path}: the folder cannot be made ({error.strerror}). Give a file that you can write."
        ) from error
    if not os.access(real if real.exists() else real.parent, os.W_OK):
        raise UserError(f"{path}: cannot be opened for appending. Give a file that you can write.")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a results file and lock it. A new file that has no line at the end is deleted."""
    while True:
        with locked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as handle:
            assert handle is not None  # it waits for other processes
            if not os.fstat(handle).st_nlink:  # the process that held the lock deleted it
                continue
            try:
                yield handle
            finally:
                if not os.fstat(handle).st_size:
                    regular_file(path).unlink()
            return


def append_line(path: Path, line: dict, check: Callable[[], None] = lambda: None) -> None:
    """Append any line under the lock of its file, gzip or plain, after a call of `check`, which may refuse it.

    See :func:`append_result`.
    """
    line, record = take_sentences(line)
    data = (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode()
    check_writable(path)
    with named_if_full(path), _opened(path) as handle:
        check()
        size = os.fstat(handle).st_size
        if path.suffix == ".gz":
            data = gzip.compress(data, mtime=0)  # a gzip file may have several parts
        elif size and os.pread(handle, 1, size - 1) != b"\n":
            data = b"\n" + data
        with append_sentences(path, [record]) if record else nullcontext():
            append_whole(handle, data)
