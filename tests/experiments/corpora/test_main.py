"""The command that prepares a corpus: what shapes a folder is kept, and processes share the work."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.corpora.__main__ import main
from experiments.corpora.catalogue import CORPORA
from experiments.corpora.fetch import locked


@pytest.mark.usefixtures("quick_starts")
def test_a_second_process_waits_for_the_first_and_takes_what_it_made(prepare, shorten, corpus, tmp_path):
    data = shorten(corpus("brown"), tmp_path / "data", train=50, valid=20, test=20)
    command = [sys.executable, "-m", "experiments.corpora", "brown", "--data", str(data)]
    folder = tmp_path / "work" / "data" / "brown"
    with locked(folder):
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        assert all("waiting for another process" in process.stderr.readline() for process in both)
    made = []
    for process in both:
        output, errors = process.communicate()
        assert (process.returncode, Path(output.rstrip("\n"))) == (0, folder / "bin"), errors
        made.append(any(line.startswith("making") for line in errors.splitlines()))
    assert sorted(made) == [False, True]


def test_a_folder_made_with_other_settings_is_refused_even_half_made(prepare, shorten, corpus, tmp_path):
    data = shorten(corpus("multi30k"), tmp_path / "data", train=105, val=20, test=20)
    assert prepare("multi30k", "--data", data, "--pieces", 200)[0] == 0
    folder = tmp_path / "work" / "data" / "multi30k"
    refused = (
        2,
        f"scripts/prepare.sh multi30k: error: {folder} was made with --pieces 200, not with --pieces 6000. Use --pieces 200, or "
        f"remove {folder}.",
    )
    assert prepare("multi30k", "--data", data) == refused
    shutil.rmtree(folder / "bin")  # as after an interruption
    assert prepare("multi30k", "--data", data) == refused
    (folder / "settings.json").unlink()  # as made by an earlier version, which is taken for the default
    assert "was made with --pieces 6000, not with --pieces 200" in prepare("multi30k", "--pieces", 200)[1]
    assert prepare("multi30k", "--data", data)[0] == 0


def test_settings_that_a_folders_name_tells_are_checked_where_it_is_named_otherwise(prepare, shorten, corpus, tmp_path):
    data = shorten(corpus("brown"), tmp_path / "data", train=20, valid=20, test=20)
    both = ("--data", data, "--output", tmp_path / "out")
    assert prepare("brown", *both)[0] == 0
    assert "out was made with no --head, not with --head 7. Use no --head" in prepare("brown", *both, "--head", 7)[1]
    (tmp_path / "out" / "settings.json").unlink()
    assert prepare("brown", *both, "--head", 7) == (0, str(tmp_path / "out" / "bin"))


def test_a_missing_corpus_leaves_no_folder_behind(prepare, tmp_path):
    status, said = prepare("brown", "--data", tmp_path / "none")
    assert status == 2 and f"{tmp_path}/none lacks train.txt or cr09" in said
    assert not (tmp_path / "work" / "data" / "brown").exists()


@pytest.mark.parametrize("flags", [("--head", "0"), ("--head", "-1"), ("--workers", "0"), ("--pieces", "many")])
def test_numbers_below_one_are_refused(prepare, flags, capsys):
    with pytest.raises(SystemExit):
        prepare("brown", *flags)
    assert f"argument {flags[0]}: {flags[1]}: expected a whole number" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(CORPORA))
def test_help_says_what_a_script_takes(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    said = capsys.readouterr().out
    assert stopped.value.code == 0 and "--data" in said and "--download" in said


def test_a_package_that_is_missing_is_named_with_its_extra(prepare, corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacremoses", None)  # as if it were not installed
    status, said = prepare("multi30k", "--data", corpus("multi30k"))
    assert status == 2 and said.endswith(
        "sacremoses is not installed. In a clone of fairseq_lowrank, run pip install '.[translation]'"
    )
