"""The values of single sentences: a compressed file next to a results file has those of its lines.

The values are most of a line's size, and only tests over sentences read them. Each record of the compressed file names the line
that it belongs to, and has the fields `sentence_values` and `sentence_counts` of this line and of its `losses`. The line has the
number of sentences in their place.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fairseq_lowrank.files import read_lines, regular_file, whole_file

VALUES = ("sentence_values", "sentence_counts")
# These fields of a line identify it among the lines of its file.
KEY = ("paper", "table", "row", "task", "seed", "metric", "split", "smoke")


def sentences_file(results: Path) -> Path:
    """Return the compressed file with the values of sentences of a results file: FILE.sentences.gz for FILE.jsonl."""
    return results.with_name(f"{results.stem}.sentences.gz")


def take_sentences(line: dict) -> tuple[dict, dict]:
    """Return a line with numbers of sentences for their values, and the record of its values; empty if the line has none."""
    short, values = _take(line)
    losses = {split: _take(loss) for split, loss in line.get("losses", {}).items()}
    if losses:
        short["losses"] = {split: loss for split, (loss, _) in losses.items()}
    if taken := {split: found for split, (_, found) in losses.items() if found}:
        values["losses"] = taken
    return short, {name: line[name] for name in KEY if name in line} | values if values else {}


def _take(fields: dict) -> tuple[dict, dict]:
    values = {name: fields[name] for name in VALUES if name in fields}
    short = {name: value for name, value in fields.items() if name not in VALUES}
    return short | ({"sentences": len(next(iter(values.values())))} if values else {}), values


@contextmanager
def append_sentences(results: Path, records: Iterable[dict]) -> Iterator[None]:
    """Append records to the compressed file of a results file, and then run the block, which writes their lines.

    If the block fails, the records are removed. If the process is killed, records without a line may stay, which do no harm; a
    line without its record would lose its values. The caller holds the lock of the results file. The same records give the same
    bytes.
    """
    text = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    path = sentences_file(results)
    before = path.read_bytes() if path.exists() else b""
    with whole_file(path, "wb") as file:
        file.write(before + gzip.compress(text.encode(), mtime=0))
        file.flush()
        os.fsync(file.fileno())
    try:
        yield
    except BaseException:
        if before:
            os.truncate(path, len(before))  # the disk may be too full for another copy
        else:
            regular_file(path).unlink()
        raise


def add_sentences(results: Path, lines: list[dict], complain: Callable[[str], None]) -> None:
    """Put the values of sentences into the lines of a results file; lines that have their values stay.

    If two lines have the same paper, table, row, task, seed, metric and split, the last line has the values. Values that are not
    found are left out after a call of `complain`.

    Raises:
        UserError: the compressed file is damaged.
    """
    wanted = {_key(line): line for line in lines if _numbers(line)}
    if not wanted:
        return
    path = sentences_file(results)
    if not path.exists():
        complain(
            f"{path} does not exist. It has the values of the sentences of {results.name}, so tests over sentences are left out. "
            "Copy it from where you have that file."
        )
        return
    found = {}
    for number, text in enumerate(read_lines(path), start=1):
        try:
            record = json.loads(text)
            found[_key(record)] = record
        except (ValueError, AttributeError, TypeError) as error:
            complain(f"{path}, line {number}: not a record of sentences ({error})")
    for key, line in wanted.items():
        record = found.get(key, {})
        if _numbers(take_sentences(record)[0]) != _numbers(line):
            complain(
                f"{path}: has not the sentences of row {line.get('row')}, seed {line.get('seed')}; they are left out"
            )
            continue
        line |= {name: record[name] for name in VALUES if name in record}
        for split, values in record.get("losses", {}).items():
            line["losses"][split] |= values


def _key(line: dict) -> str:
    return json.dumps([line.get(name) for name in KEY])


def _numbers(line: dict) -> dict[str, int]:
    """Return the numbers of sentences whose values are in the compressed file, by split; those of the score have no split."""
    parts = {"": line, **line.get("losses", {})}
    return {
        split: part["sentences"]
        for split, part in parts.items()
        if "sentences" in part and not any(name in part for name in VALUES)
    }
