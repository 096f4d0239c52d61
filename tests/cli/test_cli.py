"""The command line as a whole, and its smallest commands."""

import argparse
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fairseq_lowrank
from experiments import __main__ as experiments
from experiments import commands
from fairseq_lowrank import cli, versions

EXPERIMENTS = "python -m experiments"
MODULES = cli.command_modules(cli) | cli.command_modules(commands)


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["--help"])
    assert exit.value.code == 0
    output = " ".join(capsys.readouterr().out.split())
    assert {"average", "convert", "env", "launch", "user-dir"} <= set(cli.command_modules(cli))
    assert all(name in output and module.HELP in output for name, module in cli.command_modules(cli).items())


@pytest.mark.parametrize("name", cli.command_modules(cli))
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main([name, "--help"])
    assert exit.value.code == 0
    assert cli.command_modules(cli)[name].__doc__.splitlines()[0] in capsys.readouterr().out


@pytest.mark.parametrize("module", [*MODULES.values()], ids=[*MODULES])
def test_every_flag_is_explained(module):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    texts = {action.option_strings[0]: action.help or "" for action in parser._actions if action.option_strings}
    assert not [flag for flag, text in texts.items() if len(text.partition("(default")[0]) < 4]


def test_every_command_is_in_one_group():
    grouped = [name for group in cli.GROUPS for name in group.commands]
    assert sorted(grouped) == sorted(cli.command_modules(cli))
    assert all(group.example.split()[0] in group.commands for group in cli.GROUPS)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["mesure", "x.pt"], "'measure'"),
        (["--user-dir", "here", "traduce"], None),
        (["measure", "--sequnces", "3"], "'--sequences'"),
        (["measure", "--wholly-other"], None),
    ],
)
def test_a_misspelled_word_is_answered_with_the_closest(words, meant, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(words)
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert (f"Did you mean {meant}?" in error) if meant else ("Did you mean" not in error)


@pytest.mark.parametrize("name", cli.MOVED)
def test_a_former_command_names_the_new_one(name, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main([name, "words", "--of", "old"])
    assert exit.value.code == 2
    new = re.search("Use '(.+?)'", capsys.readouterr().err.splitlines()[-1])[1]
    program, main = (
        ("fairseq-lowrank", cli.main) if new.startswith("fairseq-lowrank") else (EXPERIMENTS, experiments.main)
    )
    with pytest.raises(SystemExit) as exit:
        main([*new.removeprefix(program).split(), "--help"])
    printed = capsys.readouterr().out
    command, *flags = new.split(" --")
    assert exit.value.code == 0 and f"usage: {command} " in printed
    assert all(f"--{flag.split()[0]} " in printed for flag in flags)


def test_an_unknown_command_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["nonsense"])
    assert exit.value.code == 2
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err.splitlines()[-1]


def test_tools_take_models_of_another_plugin(plugins_leave, capsys):
    pytest.importorskip("fairseq")
    plugin = str(Path(__file__).parents[2] / "examples" / "evidence" / "controls")
    words = ["params", "--arch", "transformer_small_start_iwslt_de_en", "--vocab-size", "100"]
    assert cli.main(words) == 2
    for said in (
        ["--user-dir", plugin, *words],
        [*words, "--user-dir", plugin],
        [words[0], "--user-dir", plugin, *words[1:]],
    ):
        assert cli.main(said) == 0
        assert "total" in capsys.readouterr().out
    assert cli.main(["--user-dir", "nowhere", *words]) == 2
    assert "--user-dir nowhere" in capsys.readouterr().err


def test_a_plugin_that_fails_is_imported_again(plugins_leave, tmp_path, capsys):
    pytest.importorskip("fairseq")
    plugin = tmp_path / "failing plugin"
    plugin.mkdir()
    (plugin / "__init__.py").write_text("raise RuntimeError('later')\n")
    words = ["params", "--user-dir", str(plugin), "--arch", "transformer_tiny", "--vocab-size", "100"]
    for _ in range(2):
        assert cli.main(words) == 1
        assert "RuntimeError: later" in capsys.readouterr().err.splitlines()[-1]
    assert cli.main(["params", "--user-dir", str(plugin / "__init__.py"), *words[3:]]) == 2
    assert "__init__.py: is a file. Use the folder of your plugin" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["env", "--kernels", "--device", "nonsense"], "--device nonsense: expected a GPU or the CPU"),
        (["env", "--kernels", "--device", "meta"], "--device meta: expected a GPU or the CPU"),
        (["record", "--row", " ", "--seed", "1", "--score", "x", "--results", "x.jsonl"], "--row ' ': expected a name"),
    ],
)
def test_values_that_mean_nothing_are_refused(words, message, capsys):
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_flags_may_stand_between_the_other_words_of_a_command(tmp_path, monkeypatch, capsys):
    given = []
    for name in ("translate", "inspect", "launch", "params"):
        monkeypatch.setattr(cli.command_modules(cli)[name], "run", given.append)
    for name in ("a.pt", "b.pt"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["translate", "a.pt", "--data", "D", "one.txt", "--beam", "2", "two.txt"]) == 0
    assert cli.main(["inspect", "--spectrum", "a.pt", "--labels", "x", "--seed", "2", "b.pt"]) == 0
    assert cli.main(["launch", "--workers", "2", "--", "fairseq-train", "D", "--workers", "9"]) == 0
    assert cli.main(["params", "--vocab-size", "9", "--encoder-layers", "3", "--arch", "transformer"]) == 0
    translate, inspect, launch, params = given
    assert (str(translate.data), [*map(str, translate.files)], translate.beam) == ("D", ["one.txt", "two.txt"], 2)
    assert ([*map(str, inspect.checkpoints)], inspect.labels, inspect.seed) == (["a.pt", "b.pt"], ["x"], 2)
    assert launch.workers == 2 and launch.fairseq_command[-4:] == ["fairseq-train", "D", "--workers", "9"]
    assert params.flags == ["--encoder-layers", "3"] and params.checkpoint is None


def test_a_checkpoint_that_does_not_exist_is_named_before_another_is_loaded(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.pt").touch()
    monkeypatch.chdir(tmp_path)
    for words in (
        ["inspect", "--spectrum", "a.pt", "b.pt"],
        ["measure", "a.pt", "--compare", "b.pt"],
        ["translate", "b.pt"],
    ):
        assert cli.main(words) == 2
        assert "b.pt is not a checkpoint file" in capsys.readouterr().err.splitlines()[-1]


def test_user_dir_is_the_folder_of_the_package(capsys):
    assert cli.main(["user-dir"]) == 0
    assert Path(capsys.readouterr().out.strip()).samefile(Path(fairseq_lowrank.__file__).parent)


@pytest.mark.parametrize("words", [["user-dir"], ["params", "no.pt"]])
def test_a_command_leaves_the_level_of_logs_as_it_was(words, monkeypatch):
    monkeypatch.setattr(logging.root, "level", logging.INFO)
    cli.main(words)
    assert logging.root.level == logging.INFO


def test_env_shows_versions_and_devices(capsys):
    assert cli.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = dict(re.split(" {2,}", line, maxsplit=1) for line in lines)
    assert rows["fairseq_lowrank"] == fairseq_lowrank.__version__
    assert rows["python"] == ".".join(map(str, sys.version_info[:3]))
    assert rows["commit"] == versions.commit()
    assert {"torch", "fairseq", "transformers", "peft", "accelerate", "sacrebleu", "cpu"} <= set(rows)
    assert cli.main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows


def test_the_module_runs_as_a_command():
    result = subprocess.run([sys.executable, "-m", "fairseq_lowrank.cli", "--version"], capture_output=True, text=True)
    assert result.stdout == f"fairseq-lowrank {fairseq_lowrank.__version__}\n"


def test_no_library_talks_beside_a_command_that_loads_fairseq(tmp_path):
    pytest.importorskip("fairseq")
    command = [sys.executable, "-W", "ignore", "-m", "fairseq_lowrank.cli", "params", "--arch", "transformer"]
    result = subprocess.run([*command, "--vocab-size", "100", "--output", tmp_path], capture_output=True, text=True)
    assert result.returncode == 0 and "DEBUG" not in result.stderr + result.stdout


def to_a_reader_that_stopped(*arguments) -> None:
    """Run a command whose output nobody reads: it ends well and says nothing of it."""
    read, written = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fairseq_lowrank.cli", *arguments]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        result = subprocess.run(command, stdout=written, stderr=subprocess.PIPE, text=True, env=buffered)
    finally:
        os.close(written)
    assert result.returncode == 0
    assert "error" not in result.stderr and "BrokenPipe" not in result.stderr


def test_an_interruption_ends_without_a_traceback(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.command_modules(cli)["user-dir"], "run", interrupted)
    assert cli.main(["user-dir"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_stops_early_costs_no_file_and_no_message(tmp_path):
    to_a_reader_that_stopped("user-dir")
    pytest.importorskip("fairseq")
    to_a_reader_that_stopped("params", "--arch", "transformer", "--vocab-size", "100", "--output", tmp_path)
    assert (tmp_path / "params.json").is_file()
