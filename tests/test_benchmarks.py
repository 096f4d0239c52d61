"""What the benchmarks share: files are refused before anything is measured."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import measure


def test_an_output_that_cannot_be_written_is_refused_when_arguments_are_read(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    measure.add_common_arguments(parser, rounds=1)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.json").mkdir()
    for output in ("file/a.json", "a.txt", "folder.json"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--output", str(tmp_path / output)])
        assert str(tmp_path / output) in capsys.readouterr().err.splitlines()[-1]
    wanted = tmp_path / "new" / "a.json"
    assert parser.parse_args(["--output", str(wanted)]).output == wanted
    assert not wanted.parent.exists()
