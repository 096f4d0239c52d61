"""The benchmarks: files are refused before anything is measured, and the baseline is fairseq as it is without us."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import attention
import gpu
import measure
import transformers_layers

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
    assert (grouped.projection.state_heads, fixed.head_dim) == (4, 96)
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


def test_the_operation_alone_is_that_of_the_layer():
    names = ["mixhead-a", "mixhead-b", "talking-heads+sigsoftmax", "mha@blocked"]
    small = ["--embed-dim", "8", "--heads", "2", "--baseline", "sdpa", "--layers", *names]
    options = attention.parse([*small, "--operation"])
    x = torch.randn(5, 3, 24, generator=torch.Generator().manual_seed(0))
    q, k, v = x.unflatten(-1, (3, 2, 4)).permute(2, 1, 3, 0, 4)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
    for name in ("sdpa", "mixhead-a", "mixhead-b", "mha@blocked"):  # mixing starts as the unit matrix
        layer = attention.build(name, options, 5)
        torch.testing.assert_close(layer.call(layer.module, x), expected)
    mixed = attention.build("talking-heads+sigsoftmax", options, 5)
    assert (mixed.call(mixed.module, x) - expected).abs().max() > 1e-3


def test_layers_that_read_other_queries_keys_or_values_have_no_operation_alone(capsys):
    for name in ("mqa", "mhe-add", "fairseq", "mha:value_dim=32", "mha:score=synthesizer-dense"):
        with pytest.raises(SystemExit):
            attention.parse(["--operation", "--baseline", "sdpa", "--layers", name])
        assert "--operation knows sdpa" in capsys.readouterr().err.splitlines()[-1]


def test_the_least_memory_is_drawn_too(tmp_path):
    arguments = [
        "--embed-dim",
        "8",
        "--heads",
        "2",
        "--baseline",
        "sdpa",
        "--layers",
        "mha",
        "--tokens",
        "1",
        "--rounds",
        "1",
    ]
    options = attention.parse([*arguments, "--lengths", "3"])
    results = attention.at_length(options, 3)
    assert all(0 < result["peak_mebibytes"] < 0.05 for result in results)
    attention.picture(results, tmp_path / "a.svg", vars(options))
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_the_talking_heads_of_the_peer_have_their_own_label(tmp_path):
    options = attention.parse(["--layers", "talking-heads", "--baseline", "sdpa"])
    found = {"length": 8, "batch": 1, "milliseconds": 1.0, "peak_mebibytes": 1.0}
    results = [{"layer": name} | found for name in ("sdpa", "talking-heads", "x-transformers")]
    attention.picture(results, tmp_path / "a.svg", vars(options))
    drawn = (tmp_path / "a.svg").read_text()
    assert "<!-- x-transformers' talking heads -->" in drawn and "<!-- talking-heads (this package) -->" in drawn


def test_goals_are_read_from_what_was_measured(tmp_path):
    def result(layer, length, **measured):
        return {"layer": layer, "length": length} | measured

    measured = [
        result(gpu.A, 2048, ratio=3.1, memory_ratio=1.1),
        result(gpu.A, 8192, ratio=2.4, memory_ratio=1.4),
        result(gpu.B, 2048, ratio=3.9, memory_ratio=1.2),
    ]
    formula = [
        result(f"mixhead-a@{name}", 2048, milliseconds=taken) for name, taken in (("reference", 60), ("triton", 10))
    ]
    rows = [{"row": "mha", "ratio": 1.0}, {"row": "mixhead-a", "ratio": 0.8}]
    long = [result(gpu.A, 32768, milliseconds=90.0, memory_ratio=1.0)]
    for name, results in (("operation", measured), ("long", long), ("formula", formula), ("training", rows)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": results}))
    (tmp_path / "steps").write_text("check-kernels\t0\t50\nlayer\t124\t60\n")
    found = gpu.gathered(tmp_path)
    assert found["steps"][1] == {"name": "layer", "status": 124, "seconds": 60}
    goals = {goal.name: (goal.measured, goal.met) for goal in gpu.goals(found)}
    assert goals == {
        f"{gpu.A}, n 2048: time by flash's": (3.1, False),
        f"{gpu.A}, n 8192: time by flash's": (2.4, True),
        f"{gpu.B}, n 2048: time by flash's": (3.9, True),
        f"{gpu.B}, n 8192: time by flash's": (None, None),
        f"{gpu.A}, every n: memory of attention by flash's": (1.4, False),
        f"{gpu.A}, every n: memory of a layer by flash's": (None, None),
        f"{gpu.A}, n 32768: milliseconds": (90.0, True),
        f"{gpu.B}, every n: memory of attention by flash's": (1.2, True),
        f"{gpu.B}, every n: memory of a layer by flash's": (None, None),
        f"{gpu.B}, n 32768: milliseconds": (None, None),
        "mixhead-a, n 2048: the formula's time by the kernels'": (6.0, True),
        "training with mixhead-a, n 512: tokens a second by mha's": (0.8, False),
    }
    assert "not measured" in gpu.table(list(gpu.goals(found)))


def test_the_measurement_of_a_gpu_ends_within_nine_minutes():
    """The limits of its steps, and the seconds after which a step that does not end is killed."""
    script = (BENCHMARKS / "gpu.sh").read_text()
    limits = [int(seconds) for seconds in re.findall(r"^step \S+ (\d+) ", script, re.MULTILINE)]
    kill = int(re.search(r"timeout -k (\d+) ", script)[1])
    assert len(limits) == 8 and sum(limits) + kill * len(limits) <= 9 * 60
    assert f"together {sum(limits)} seconds" in script


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


@pytest.mark.parametrize("name, what", [("bert", "training"), ("llama", "forward"), ("llama", "generation")])
def test_layers_of_transformers_are_measured_as_ratios_to_their_own(name, what):
    small = "--embed-dim 16 --heads 2 --layers 1 --lengths 5 --tokens 10 --rounds 2 --presets mha mixhead-b"
    options = transformers_layers.parse(small.split())
    found = transformers_layers.measured(name, what, 5, options)
    assert [result["row"] for result in found] == ["sdpa", "mha", "mixhead-b"]
    assert found[0]["ratio"] == 1 and all(result["milliseconds"] > 0 < result["ratio"] for result in found)
    assert all(result["batch"] == (1 if what == "generation" else 2) for result in found)


@pytest.mark.parametrize("name", transformers_layers.MODELS)
def test_a_layer_of_transformers_is_called_as_its_model_calls_it(name):
    small = "--embed-dim 16 --heads 4 --layers 1 --lengths 5 --presets mixhead-b"
    options = transformers_layers.parse(small.split())
    tokens = torch.randint(9, (2, 5), generator=torch.Generator().manual_seed(0))
    outputs = []
    for row in ("sdpa", "mixhead-b"):
        model = transformers_layers.build(name, row, options)
        module, _, _ = transformers_layers.attention_modules(model)[0]
        handle = module.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
        transformers_layers.layer_step(model, tokens, training=False)()
        handle.remove()
    for output in outputs[1:]:  # in the model, for the shape of the gradient, and in the step
        torch.testing.assert_close(output, outputs[0], atol=1e-6, rtol=1e-5)
    assert len(outputs) == 6


def test_a_step_of_generation_leaves_the_cache_as_it_was():
    options = transformers_layers.parse(["--embed-dim", "16", "--heads", "2", "--layers", "1", "--lengths", "5"])
    model = transformers_layers.build("llama", "mha", options)
    lengths = []
    steps = transformers_layers.generation_step(model, torch.ones(1, 5, dtype=torch.long))
    model.register_forward_hook(lambda module, args, output: lengths.append(output.past_key_values.get_seq_length()))
    steps()
    steps()
    assert lengths == 2 * list(range(6, 6 + transformers_layers.STEPS_OF_GENERATION))


def test_two_copies_of_the_package_take_turns_in_separate_processes(tmp_path):
    (tmp_path / "fairseq_lowrank").symlink_to(BENCHMARKS.parent / "fairseq_lowrank")
    output = tmp_path / "versions.json"
    small = ["--presets", "mha", "--lengths", "16", "--cases", "plain", "padding", "--rounds", "1"]
    code = [sys.executable, BENCHMARKS / "versions.py", tmp_path, *small, "--output", output]
    measured = subprocess.run(code, capture_output=True, text=True)
    assert measured.returncode == 0, measured.stderr
    results = json.loads(output.read_text())["results"]
    assert len(results) == 8 and {result["direction"] for result in results} == {"forward", "training"}
    assert all(("after_to_sdpa" in result) == (result["case"] == "plain") for result in results)
    wrong = subprocess.run([*code[:2], tmp_path / "new"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "Give the root of a clone or a worktree." in wrong.stderr
