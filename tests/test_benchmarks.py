"""The benchmarks: files are refused before anything is measured, and the baseline is fairseq as it is without us."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import measure

BENCHMARKS = Path(measure.__file__).parent


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


def test_generation_is_compared_with_fairseq_in_a_process_without_this_package(
    translation_data, fairseq_command, tmp_path
):
    texts = [f"--{split}pref={translation_data.parent / split}" for split in ("train", "valid", "test")]
    fairseq_command("preprocess", "-s", "de", "-t", "en", *texts, "--joined-dictionary", "--destdir", tmp_path)
    small = "--sentences 8 --batch 4 --beam 2 --length 3 --layers 1 --embed-dim 16 --heads 2 --rounds 2 --threads 1"
    output = ["--rows", "stock", "mha", "--output", tmp_path / "generation.json"]
    code = [sys.executable, BENCHMARKS / "generation.py", tmp_path, *small.split(), *output]
    measured = subprocess.run(code, capture_output=True, text=True)
    assert measured.returncode == 0, measured.stderr
    stock, mha = json.loads((tmp_path / "generation.json").read_text())["results"]
    assert (stock["row"], stock["ratio"], mha["row"]) == ("stock", 1, "mha")
    assert stock["cached_bytes_per_token"] == mha["cached_bytes_per_token"] == 2 * 16 * 4
