"""The benchmarks: files are refused before anything is measured, and the baseline is fairseq as it is without us."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import attention
import measure

from fairseq_lowrank.attention import PRESETS

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


def test_a_layer_is_named_by_its_preset_and_axes(capsys):
    names = [
        "gqa:key_value_heads=4",
        "mha:value_dim=32,score_mixing=static+sigsoftmax@reference",
        "fixedhead:head_dim=96",
    ]
    options = attention.parse(["--layers", *names, "--baseline", "mha"])
    assert options.layers == ["mha", *names]
    grouped, composed, fixed = (attention.build(name, options, 8).module for name in names)
    assert (grouped.projection.memory_heads, fixed.head_dim) == (4, 96)
    spec = composed.spec
    assert (spec.value_dim, spec.score_mixing, spec.activation, composed.backend) == (
        32,
        "static",
        "sigsoftmax",
        "reference",
    )
    synthesizer = attention.ours(
        "mha:score=synthesizer-dense", attention.parse(["--baseline", "mha", "--lengths", "9"])
    )
    assert synthesizer.score.max_positions == 9
    for name, message in (
        ("gqa", "needs a number of key and value heads"),
        ("gqa:key_value_heads=3", "expected a divisor of num_heads=8"),
        ("mha:value_dim=many", "value_dim='many': expected a positive integer"),
        ("mha:size=3", "unknown attention axis size"),
        ("nope", "attention preset 'nope': expected one of mha"),
        ("mha@nope", "nope"),
    ):
        with pytest.raises(SystemExit):
            attention.parse(["--layers", name, "--baseline", "mha"])
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_every_preset_is_measured_unless_it_cannot_have_the_sizes():
    def presets(*arguments):
        return [name.partition(":")[0] for name in attention.parse(["--baseline", "mha", *arguments]).layers]

    assert set(PRESETS) <= set(presets()) and not set(PRESETS) & set(attention.PEERS)
    assert set(PRESETS) - set(presets("--heads", "3", "--embed-dim", "12")) == {"gqa"}
    assert set(PRESETS) - set(presets("--head-dim", "16")) == {"el"}


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
