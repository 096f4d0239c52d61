"""Errors with fields, and what a command prints of an exception."""

import json
import pickle
import subprocess
import sys

import pytest
import torch

from fairseq_lowrank.attention import build_attention
from fairseq_lowrank.messages import FlagError, InvalidCheckpoint, StateDictMismatch, UserError, report

ERRORS = [
    UserError("no data"),
    FlagError("--heads", 3, "16 is not divisible by it", "Use 4."),
    InvalidCheckpoint("x.pt", "it is empty", remedy="Use another."),
    StateDictMismatch("encoder.w", (3, 2), (4, 2), others=2, path="x.pt", remedy="Do this."),
    StateDictMismatch("encoder.w", None, (4, 2)),
    StateDictMismatch("encoder.w", (4, 2), None),
    StateDictMismatch("encoder", {"mixing": "none"}, {"mixing": "static"}),
]


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_errors_keep_their_fields_when_pickled(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), vars(copy), str(copy)) == (type(error), vars(error), str(error))


@pytest.mark.parametrize("error", ERRORS[1:], ids=str)
def test_text_of_an_error_has_its_fields(error):
    fields = dict(vars(error))
    if None in (fields.get("saved", ""), fields.get("current", "")):
        del fields["saved"], fields["current"]  # only one side has the tensor
    for field in fields.values():
        values = field.values() if isinstance(field, dict) else [field]
        assert all(str(list(value) if isinstance(value, tuple) else value) in str(error) for value in values if value)


def test_errors_need_neither_fairseq_nor_torch():
    script = (
        "import sys, fairseq_lowrank.messages; print(*(name for name in ('torch', 'fairseq') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def raised(error, over=None):
    """Return ``error`` after it was raised, if given while the exception ``over`` was handled."""
    try:
        try:
            raise over or error
        except Exception:
            if over is None:
                raise
            raise error  # noqa: B904
    except Exception as last:
        return last


def of_the_library():
    with pytest.raises(ValueError) as error:
        build_attention("mha", 10, 3)
    return error.value


def of_torch():
    with pytest.raises(RuntimeError) as error:
        torch.ones(2) @ torch.ones(3)
    return error.value


def of_json():
    with pytest.raises(ValueError) as error:
        json.loads("{")
    return error.value


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UserError("a\n  b"), "a b"),
        (raised(Exception("cannot load;"), over=UserError("heads differ")), "heads differ"),
        (FileNotFoundError(2, "No such file or directory", "x.pt"), "x.pt: No such file or directory"),
        (ModuleNotFoundError("No module named 'sacrebleu'", name="sacrebleu"), "fairseq-lowrank[translation]"),
    ],
    ids=str,
)
def test_report_takes_one_line_for_an_expected_exception(error, words, capsys, monkeypatch):
    assert report(error, "command") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("command: error: ")
    assert words in line
    monkeypatch.setenv("LOWRANK_TRACEBACK", "1")
    report(error, "command")
    assert capsys.readouterr().err.splitlines()[-1] == line


@pytest.mark.parametrize(
    "error",
    [
        raised(KeyError("model")),
        raised(AttributeError("no attribute")),
        raised(torch.OutOfMemoryError("full")),
        raised(OSError("unexpected end")),
        raised(ModuleNotFoundError("No module named 'x'", name="x")),
        of_the_library(),
        of_torch(),
        of_json(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_report_shows_the_traceback_of_an_unexpected_exception(error, capsys):
    assert report(error, "command") == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith(f"command: error: {type(error).__name__}: ")
