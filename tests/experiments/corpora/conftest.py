"""Preparations run in this process."""

import gzip
from pathlib import Path

import pytest

from experiments.corpora.__main__ import main
from fairseq_lowrank.files import read_lines


@pytest.fixture
def prepare(tmp_path, monkeypatch, capsys):
    """``prepare(corpus, …)``: run the command; returns its exit status and its last line."""
    monkeypatch.setenv("LOWRANK_WORK", str(tmp_path / "work"))
    monkeypatch.delenv("LOWRANK_DATA", raising=False)

    def run(*arguments) -> tuple[int, str]:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, (captured.out if status == 0 else captured.err).splitlines()[-1]

    return run


@pytest.fixture
def shorten():
    """``shorten(a, b, train=100)``: copy the first 100 lines of each file `train*` from one folder to another."""

    def copy(source: Path, target: Path, **lines: int) -> Path:
        target.mkdir(exist_ok=True)
        for name, count in lines.items():
            for file in source.glob(f"{name}*"):
                head = list(read_lines(file))[:count]
                (target / file.name).write_bytes(gzip.compress("".join(f"{line}\n" for line in head).encode()))
        return target

    return copy
