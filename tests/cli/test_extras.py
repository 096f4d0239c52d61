"""A package that is not installed is named with the extra that brings it."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

# Imported here whole: an import without a package would leave parts of fairseq behind for the next test.
import fairseq_lowrank.plugin  # noqa: F401
from fairseq_lowrank import cli, messages

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        (
            ["params", "--arch", "transformer_lm", "--vocab-size", "99", "--sweep", "heads", "--output", "out"],
            "matplotlib",
            "analysis",
        ),
        (["average", "a.pt", "b.pt", "--output", "c.pt"], "fairseq", "fairseq"),
    ],
)
def test_a_command_names_the_extra_that_it_misses(command, package, extra, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("a.pt", "b.pt"):
        (tmp_path / name).touch()
    ours = ("fairseq_lowrank.tools.pictures", "fairseq_lowrank.tools.fairseq.checkpoints")  # import it where they begin
    for name in list(sys.modules):
        if name.partition(".")[0] == package or name in ours:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("fairseq_lowrank.tools.pictures", raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    assert cli.main(command) == 2
    message = f"{command[0]}: error: {package} is not installed. In a clone of fairseq_lowrank, run pip install "
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"fairseq-lowrank {message}") and line.endswith(f" '.[{extra}]'")


def test_another_missing_module_is_named_without_an_extra():
    assert messages.missing_package_hint(ModuleNotFoundError("No module named 'x'", name="x")) == "No module named 'x'"


def test_the_extras_are_those_of_the_project():
    declared = {
        extra: {re.match(r"[\w-]+", package)[0] for package in packages}
        for extra, packages in PROJECT["optional-dependencies"].items()
    }
    for extra in ("translation", "analysis", "bert"):
        assert declared[extra] == {module.replace("_", "-") for module in messages.EXTRAS[extra]}
    assert "fairseq" in declared
