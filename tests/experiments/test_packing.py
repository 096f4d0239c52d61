"""Logs are kept in one archive, in which each line finds its own."""

import gzip
import json

import pytest

from experiments import __main__ as experiments
from experiments import packing
from experiments.commands.pack import RESULTS
from fairseq_lowrank.files import read_lines


def named_logs(line):
    """The logs that a line names: its own, and those of its pre-trainings."""
    while line:
        if line.get("log"):
            yield line["log"]
        line = line.get("pretraining") or line.get("continued")


def test_each_line_of_the_repository_has_its_log():
    missing = []
    for folder in (RESULTS, RESULTS / "evidence-again"):
        kept = {name.removeprefix("evidence-again/") for name in packing.read_logs(RESULTS)}
        kept |= {file.relative_to(folder).as_posix().removesuffix(".gz") for file in folder.rglob("*.log.gz")}
        for file in folder.glob("*.jsonl*"):
            for text in read_lines(file):
                missing += [name for name in named_logs(json.loads(text)) if name.removesuffix(".gz") not in kept]
    assert not missing


@pytest.fixture
def folder(tmp_path):
    for name, text in {"t/a-seed1": "a", "t/b-seed1": "b", "matrices": "first\n"}.items():
        file = tmp_path / "logs" / f"{name}.log.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(text.encode()))
    return tmp_path


def test_logs_are_moved_to_an_archive_and_read_from_it(folder):
    assert experiments.main(["pack", str(folder)]) == 0
    assert [file.name for file in folder.iterdir()] == [packing.ARCHIVE]
    assert packing.read_log(folder, "logs/t/b-seed1.log.gz") == b"b"
    assert packing.read_log(folder, "logs/t/c-seed1.log.gz") is None
    before = (folder / packing.ARCHIVE).read_bytes()
    for name, text in {"matrices": "second\n", "t/a-seed1": "a"}.items():
        (folder / "logs" / "t").mkdir(parents=True, exist_ok=True)
        (folder / "logs" / f"{name}.log.gz").write_bytes(gzip.compress(text.encode()))
    assert packing.read_log(folder, "logs/matrices.log.gz") == b"second\n"  # a loose log comes first
    packing.pack_logs(folder)
    assert packing.read_log(folder, "logs/matrices.log.gz") == b"first\nsecond\n"
    assert packing.read_log(folder, "logs/t/a-seed1.log.gz") == b"a"
    assert before != (folder / packing.ARCHIVE).read_bytes() and packing.pack_logs(folder) == []


def test_the_same_logs_give_the_same_archive(folder, tmp_path_factory):
    packing.pack_logs(folder)
    first = (folder / packing.ARCHIVE).read_bytes()
    other = tmp_path_factory.mktemp("other")
    for name, text in reversed(packing.read_logs(folder).items()):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / f"{name}.gz").write_bytes(gzip.compress(text))
        packing.pack_logs(other)  # one after another
    assert (other / packing.ARCHIVE).read_bytes() == first


def test_a_folder_that_is_not_there_is_refused(tmp_path, capsys):
    assert experiments.main(["pack", str(tmp_path / "none")]) == 2
    assert "Give a folder of results" in capsys.readouterr().err
