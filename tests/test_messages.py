"""Errors with fields, and what a command prints of an exception."""

import ast
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

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
        (ModuleNotFoundError("No module named 'sacrebleu'", name="sacrebleu"), "pip install '.[translation]'"),
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


ROOT = Path(__file__).resolve().parent.parent
RAISED = {
    "UserError",
    "FlagError",
    "InvalidCheckpoint",
    "StateDictMismatch",
    "ValueError",
    "TypeError",
    "error",
    "refuse",
}
# The verbs with which a remedy begins. Values and shapes may say "expected …" instead.
REMEDY = re.compile(
    r"(?:^|[.:;,] |, or | or | and )"
    r"(?:Add|Ask|Build|Call|Change|Check|Choose|Convert|Copy|Count|Create|Declare|Delete|Download|Escape|Fix|Free|Give|Keep|Leave"
    r"|Load|Lower|Make|Merge|Move|Pass|Predict|Prepare|Put|Raise|Remove|Rename|Run|Save|Score|See|Set|Shorten|Split|Train|Turn"
    r"|Use|Write)\b|expected|expects|Did you mean",
    re.IGNORECASE,
)
# Messages that another one contains, or that have no remedy of their own, with the reason.
WITHOUT_REMEDY = {
    ("fairseq_lowrank/attention/states.py", "StateDictMismatch"): "the class has the remedy",
    ("fairseq_lowrank/plugin/states.py", "StateDictMismatch"): "the class has the remedy",
    ("fairseq_lowrank/attention/states.py", "UserError"): "IMPORT_PLUGIN has the remedy",
    ("fairseq_lowrank/cli/record.py", "UserError"): "REFERENCES_SCORED has the remedy",
    ("fairseq_lowrank/cli/__init__.py", "error"): "argparse's own text for flags that do not exist",
    ("fairseq_lowrank/parts/registry.py", "UserError"): "its callers pass the remedy",
    ("fairseq_lowrank/tools/fairseq/architecture.py", "UserError"): "argparse's own text",
    ("experiments/papers/comparison.py", "UserError"): "the message of a line of results",
    ("experiments/commands/representation.py", "UserError"): "its table has what is expected",
}


def text_of(node, strings):
    """Return the text of an expression, with the texts of the names in it; other values are "…"."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value, strings) for value in node.values)
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "…"
    if isinstance(node, ast.Name):
        return ". ".join(strings.get(node.id, ["…"]))
    if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "did_you_mean":
        return " Did you mean …?"
    return ". ".join(text_of(child, strings) for child in ast.iter_child_nodes(node)) or "…"


def messages(path):
    """Yield the line, the class and the text of each message in a file that is not the message of a caught error."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    strings = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            strings.setdefault(node.targets[0].id, []).append(text_of(node.value, {}))
    around = {}  # the name of the caught message around a call
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and re.search("UserError|ValueError", ast.unparse(node.type or node)):
            around |= dict.fromkeys(ast.walk(node), node.name)
    for node in ast.walk(tree):
        name = isinstance(node, ast.Call) and (getattr(node.func, "attr", None) or getattr(node.func, "id", None))
        if name not in RAISED or not node.args:
            continue
        if node in around and re.search(
            rf"\{{{around[node]}\}}['\"]$|^str\({around[node]}\)$", ast.unparse(node.args[0])
        ):
            continue  # the caught message is last, and has the remedy
        yield (
            node.lineno,
            name,
            ". ".join(text_of(one, strings) for one in (*node.args, *node.keywords)),
        )


@pytest.mark.parametrize("package", ["fairseq_lowrank", "experiments"])
def test_messages_say_what_to_do(package):
    without = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, name, text in messages(path)
        if not REMEDY.search(text) and (str(path.relative_to(ROOT)), name) not in WITHOUT_REMEDY
    ]
    assert not without, "\n".join(without)
