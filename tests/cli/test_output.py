"""What commands write: refused before anything is computed, and written whole or not at all."""

import errno
import io
import json
import os
import sys
import types
from pathlib import Path

import pytest
import torch
from full_disk import full_disk

pytest.importorskip("fairseq")

from experiments import __main__ as experiments
from experiments import commands
from fairseq_lowrank import cli, messages
from fairseq_lowrank.cli import _output
from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.tools import pictures
from fairseq_lowrank.tools.fairseq import parameters

FOLDER_COMMANDS = {
    "compare": ["results"],
    "params": ["--arch", "transformer", "--vocab-size", "1000"],
    "inspect": ["checkpoint.pt"],
    "measure": ["checkpoint.pt"],
}
EXPERIMENTS = {
    "bert import": ["bert-base-uncased"],
    "bert predict": ["checkpoint.pt", "--data", "data"],
    "report": ["results"],
    "pictures": [],
    "random-mixing": ["checkpoint.pt"],
    "representation": [],
    "variants": [],
}
FOLDER_COMMANDS |= EXPERIMENTS
CHECKPOINT_COMMANDS = {"average": ["checkpoint.pt"], "convert": ["checkpoint.pt", "--attention", "mixhead-b"]}
OF_EXPERIMENTS = cli.command_modules(commands)
OF_EXPERIMENTS |= {f"bert {name}": module for name, module in cli.command_modules(OF_EXPERIMENTS.pop("bert")).items()}
MODULES = cli.command_modules(cli) | OF_EXPERIMENTS
FILE_COMMANDS = CHECKPOINT_COMMANDS | {"bert wordpieces": ["wordpieces.json", "train.txt"]}


def run(command, *arguments):
    """Run a command of the package or of the experiments, and return its exit status."""
    main = experiments.main if command in OF_EXPERIMENTS else cli.main
    return main([*command.split(), *map(str, arguments)])


def refusal(command, arguments, output, monkeypatch, capsys):
    """The line with which a command refuses an output, which must come before it computes."""
    module = MODULES[command]
    monkeypatch.setattr(module, "run", lambda args: pytest.fail("computed"))
    assert run(command, *arguments, "--output", output) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"--output {output}" in error
    return error


def test_every_command_with_an_output_is_tried_here(capsys):
    with_output = set()
    for name in MODULES:
        with pytest.raises(SystemExit):
            run(name, "--help")
        if "--output" in capsys.readouterr().out:
            with_output.add(name)
    assert with_output == FOLDER_COMMANDS.keys() | FILE_COMMANDS.keys()


@pytest.mark.parametrize("command", FOLDER_COMMANDS)
def test_a_folder_that_cannot_be_is_refused_before_computing(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("mine")
    for output, message in (
        ("file", "Give a folder"),
        ("file/deeper", "Give a folder"),
    ):
        assert message in refusal(command, FOLDER_COMMANDS[command], tmp_path / output, monkeypatch, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("command", FILE_COMMANDS)
def test_a_file_that_cannot_be_written_is_refused_before_computing(command, tmp_path, monkeypatch, capsys):
    for output, message in (("", "is a folder"), ("none/a.pt", "does not exist")):
        assert message in refusal(command, FILE_COMMANDS[command], tmp_path / output, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("check", "name"),
    [
        (_output.check_folder, "file"),
        (_output.check_file, ""),
        (_output.check_file, "none/a.txt"),
    ],
)
def test_refused_output_is_in_the_fields_of_the_error(check, name, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FlagError) as error:
        check(tmp_path / name)
    assert (error.value.flag, error.value.value) == ("--output", tmp_path / name)


def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    assert "may not write" in refusal("params", FOLDER_COMMANDS["params"], tmp_path, monkeypatch, capsys)


def line(**changes):
    found = {"paper": "own", "table": "t", "row": "mha", "architecture": "a", "flags": "", "seed": 1, "updates": 3}
    found |= {"parameters": 9, "metric": "perplexity", "value": 3.0, "split": "test", "tokens_per_second": 1}
    curve = [{"updates": 1, "train_loss": 2.0, "valid_loss": 2.0}, {"updates": 2, "train_loss": 2.0, "valid_loss": 1.0}]
    return found | {"versions": {}, "smoke": False, "date": "2026-01-01", "curve": curve} | changes


def report(tmp_path, *lines):
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return experiments.main(["report", str(tmp_path / "lines.jsonl"), "--output", str(tmp_path / "report")])


HOSTILE = ("../../up", "a/b", "$\\frac{$", '<img src=x onerror="1">', "![x](http://x.invalid/y)", "é\nx" * 40)


@pytest.mark.parametrize("name", HOSTILE)
def test_odd_names_are_written_whole_and_inside_the_folder(tmp_path, name):
    assert report(tmp_path, line(paper=name, table=name, row=name)) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines.jsonl", "report"]
    written = {path.name for path in (tmp_path / "report").iterdir()}
    assert {"report.md", "report.csv", "report.json"} < written and len(written) == 5
    markdown = (tmp_path / "report" / "report.md").read_text()
    (picture,) = (file for file in written if file.endswith(".png"))
    assert f"({picture})" in markdown


def test_a_picture_that_fails_leaves_no_file(tmp_path, monkeypatch, capsys):
    assert report(tmp_path, line()) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "report").iterdir()}

    def fail(*args):
        raise ValueError("no ink")

    monkeypatch.setattr(pictures, "save", fail)
    assert report(tmp_path, line(value=7.0)) == 1
    assert "no ink" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "report").iterdir()} == before


@pytest.mark.parametrize("size", [0, 1000, 50_000, 399_000])
def test_checkpoint_that_does_not_fit_leaves_the_old_one(tmp_path, size):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"old")
    with full_disk(size), pytest.raises(UserError) as caught:
        _output.save_checkpoint({"model": {"weight": torch.ones(100_000)}}, path)
    assert str(path) in str(caught.value) and isinstance(caught.value.__cause__, (OSError, RuntimeError))
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"] and path.read_bytes() == b"old"


@pytest.mark.parametrize("name", ["measure", "report"])
def test_full_disk_takes_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, name):
    output = tmp_path / "new"
    args = types.SimpleNamespace(output=output)
    axes = pictures.new_figure(3, 3)[0]
    with full_disk(500):
        with pytest.raises(UserError) as caught:
            _output.write(args, name, {"text": "x" * 10_000}, [{"a": 1}], {})
        assert messages.report(caught.value, "program") == 2
        with pytest.raises(UserError, match=rf"^{output}: .*Free some space"):  # not the path of an unfinished file
            _output.write(args, name, {}, [{"a": 1}], {"picture": axes})
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(output) in error and "Free some space" in error
    assert not list(tmp_path.iterdir())


def test_full_disk_behind_standard_output_takes_one_line(capsys, monkeypatch):
    def fail(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_output, "say", fail)
    monkeypatch.setattr(_output, "discard_output", lambda: None)
    assert cli.main(["params", *FOLDER_COMMANDS["params"]]) == 2
    assert capsys.readouterr().err.endswith("error: No space left on device. Free some space.\n")


INPUTS = {"average": 0, "convert": 0, "bert wordpieces": 1}


@pytest.mark.parametrize("way", ["the name", "a symbolic link", "a hard link"])
@pytest.mark.parametrize("command", FILE_COMMANDS)
def test_an_input_is_never_replaced(command, way, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments, place = FILE_COMMANDS[command], INPUTS[command]
    for name in arguments[: place + 1]:
        Path(name).write_text("mine")
    source = Path(arguments[place])
    output = source if way == "the name" else Path("link.pt")
    if way == "a symbolic link":
        output.symlink_to(source)
    elif way == "a hard link":
        output.hardlink_to(source)
    for more in ([], ["--force"]):
        assert "is an input" in refusal(command, [*arguments, *more], output, monkeypatch, capsys)
    assert source.read_text() == "mine"


@pytest.mark.parametrize("command", FILE_COMMANDS)
def test_a_file_is_replaced_only_with_force(command, tmp_path, monkeypatch, capsys):
    output = tmp_path / "old.pt"
    output.write_text("old")
    assert "exists. Choose another place, or add --force." in refusal(
        command, FILE_COMMANDS[command], output, monkeypatch, capsys
    )
    monkeypatch.setattr(MODULES[command], "run", lambda args: None)
    monkeypatch.chdir(tmp_path)
    Path(FILE_COMMANDS[command][INPUTS[command]]).write_text("mine")
    assert run(command, *FILE_COMMANDS[command], "--force", "--output", output) == 0


def test_a_model_in_a_folder_is_replaced_only_with_force(tmp_path, monkeypatch, capsys):
    (tmp_path / "dict.txt").touch()
    assert "dict.txt exists" in refusal("bert import", ["bert-base-uncased"], tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("command", FILE_COMMANDS)
def test_what_is_no_file_is_refused_as_an_output(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "null.pt").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "pipe.pt")
    for name in ("null.pt", "pipe.pt"):
        words = [*FILE_COMMANDS[command], "--force"]
        assert "is no regular file" in refusal(command, words, tmp_path / name, monkeypatch, capsys)


def test_a_symbolic_link_stays_and_its_file_is_written(tmp_path, capsys):
    (tmp_path / "disk").mkdir()
    link, target = tmp_path / "link.pt", tmp_path / "disk" / "file.pt"
    link.symlink_to(target)
    for _ in range(2):
        _output.save_checkpoint({"model": {}}, link)
        assert link.is_symlink() and torch.load(target, weights_only=True) == {"model": {}}
    assert capsys.readouterr().err == f"replaced {link}\n"
    assert [path.name for path in target.parent.iterdir()] == ["file.pt"]


def test_reports_replace_reports_and_say_so(tmp_path, capsys):
    assert report(tmp_path, line()) == 0
    assert "replaced" not in capsys.readouterr().err
    assert report(tmp_path, line(value=7.0)) == 0
    assert capsys.readouterr().err.startswith(f"replaced {tmp_path / 'report'}")
    assert "7.00" in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.parametrize("of", ["an input", "a link"])
def test_a_file_of_a_folder_is_no_input_and_no_link(tmp_path, of):
    text = tmp_path / "predictions.txt"
    text.write_text("mine")
    if of == "a link":
        text.rename(tmp_path / "elsewhere")
        text.symlink_to(tmp_path / "elsewhere")
    args = types.SimpleNamespace(output=tmp_path, text=text if of == "an input" else None)
    with pytest.raises(FlagError, match="is an input" if of == "an input" else "is a symbolic link"):
        _output.write_together(args, lambda folder: (folder / "predictions.txt").write_text("new"))
    assert text.read_text() == "mine" and text.is_symlink() == (of == "a link")


HOSTILE_NAME = "a\x1b[2Jb\x9bc\u202ed\re"


def test_control_characters_of_results_are_printed_escaped(tmp_path, capsys):
    lines = [line(row=HOSTILE_NAME, corpus=HOSTILE_NAME, metric="x" + HOSTILE_NAME), line(row="mha\nmore")]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines) + f'{{"row": "{HOSTILE_NAME}"\n')
    pair = ["--pair", HOSTILE_NAME, HOSTILE_NAME]
    for words in (["report", path], ["report", path, "--format", "latex"], ["compare", path, *pair]):
        assert run(*words) == 0
        printed = capsys.readouterr()
        assert not set("\x1b\x9b\u202e\r") & set(printed.out + printed.err)
    assert cli.main(["compare", str(path), "--json", *pair]) == 0
    assert json.loads(capsys.readouterr().out)[0]["rows"] == [HOSTILE_NAME, HOSTILE_NAME]
    assert cli.main(["compare", str(path), "--pair", HOSTILE_NAME + "x", "mha"]) == 2
    error = capsys.readouterr().err
    assert not set("\x1b\x9b\u202e\r") & set(error) and error.count("\n") == 2


def test_a_cell_of_a_table_takes_one_line():
    assert _output.table(["", "b"], [["a\nb", 1]]).count("\n") == 1


def test_data_for_programs_is_escaped_on_a_terminal_alone(capsys, monkeypatch):
    _output.say_data("a\u2028b")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _output.say_data("a\u2028b")
    assert capsys.readouterr().out == "a\u2028b\na\\u2028b\n"


def test_checkpoint_that_torch_cannot_save_is_no_full_disk(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("a fault of torch")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match="a fault of torch"):
        _output.save_checkpoint({}, tmp_path / "checkpoint.pt")


def ascii_output(monkeypatch, *command):
    """What a command prints to a terminal that has ASCII alone."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert cli.main([*command]) == 0
    return stream.buffer.getvalue().decode("ascii")


PARAMS = ["params", *FOLDER_COMMANDS["params"]]


def test_printing_to_an_ascii_terminal_loses_no_result(monkeypatch):
    assert "log\\u2083 of the width" in ascii_output(monkeypatch, *PARAMS)


def test_json_on_an_ascii_terminal_can_be_read(monkeypatch):
    sizes = json.loads(ascii_output(monkeypatch, *PARAMS, "--json"))["sizes"]
    assert "log₃ of the width" in [row["against"] for row in sizes]


def test_command_writes_its_files_before_it_prints(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("no terminal")

    monkeypatch.setattr(_output, "say", fail)
    assert cli.main([*PARAMS, "--output", str(tmp_path / "out")]) == 1
    assert (tmp_path / "out" / "params.json").is_file()


def test_progress_is_silent_in_a_pipe(monkeypatch, capsys):
    monkeypatch.setattr(parameters, "SWEEPS", {"layers": (2,)})
    assert cli.main(["params", *FOLDER_COMMANDS["params"], "--sweep", "layers"]) == 0
    assert not capsys.readouterr().err
