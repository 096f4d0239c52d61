"""The benchmarks: files are refused before anything is measured, and the baseline is fairseq as it is without us."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import attention
import measure
import transformers_layers

BENCHMARKS = Path(measure.__file__).parent


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
        ("nope", "attention method 'nope': expected one of mha"),
        ("mha@nope", "nope"),
    ):
        with pytest.raises(SystemExit):
            attention.parse(["--layers", name, "--baseline", "mha"])
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_operation_alone_is_that_of_the_layer():
    names = ["sdpa-flash", "mixhead-a", "mixhead-b", "talking-heads+sigsoftmax", "mha@blocked"]
    small = ["--embed-dim", "8", "--heads", "2", "--baseline", "sdpa", "--layers", *names, "--operation"]
    options, with_glue = attention.parse(small), attention.parse([*small, "--glue"])
    q, k, v = torch.randn(3, 5, 3, 2, 4, generator=torch.Generator().manual_seed(0)).transpose(2, 3).transpose(1, 3)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    joint = torch.stack([q, k, v], dim=-2).permute(2, 0, 3, 1, 4).flatten(2)
    for name in ("sdpa", *names):
        layer, glued = (attention.build(name, some, 5) for some in (options, with_glue))
        found = layer.call(layer.module, q, k, v)
        if name.startswith("talking"):
            assert (found - expected).abs().max() > 1e-3
        else:  # mixing starts as the unit matrix
            torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            glued.call(glued.module, joint).unflatten(2, (2, 4)).permute(1, 2, 0, 3).shape, found.shape
        )


def test_kernels_that_leave_the_call_to_another_backend_are_not_timed(monkeypatch):
    def refused(call, backend):
        warnings.warn("the kernels cannot be used on this GPU", RuntimeWarning, stacklevel=2)

    monkeypatch.setattr(attention, "attention", refused)
    options = attention.parse(
        ["--embed-dim", "8", "--heads", "2", "--tokens", "1", "--operation", "--baseline", "sdpa", "--layers", "mha"]
    )
    failed = {}
    assert [row["layer"] for row in attention.at_length(options, 4, failed)] == ["sdpa"]
    assert list(failed) == ["mha"]


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.usefixtures("quick_starts")
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


@pytest.mark.usefixtures("quick_starts")
def test_two_copies_of_the_package_take_turns_in_separate_processes(tmp_path):
    (tmp_path / "fairseq_lowrank").symlink_to(BENCHMARKS.parent / "fairseq_lowrank")
    output = tmp_path / "versions.json"
    small = ["--presets", "mha", "--lengths", "16", "--cases", "plain", "padding"]
    small += ["--tokens", "32", "--rounds", "1"]
    code = [sys.executable, BENCHMARKS / "versions.py", tmp_path, *small, "--output", output]
    measured = subprocess.run(code, capture_output=True, text=True)
    assert measured.returncode == 0, measured.stderr
    results = json.loads(output.read_text())["results"]
    assert len(results) == 8 and {result["direction"] for result in results} == {"forward", "training"}
    assert all(("after_to_sdpa" in result) == (result["case"] == "plain") for result in results)
    wrong = subprocess.run([*code[:2], tmp_path / "new"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "Give the root of a clone or a worktree." in wrong.stderr


def test_training_is_measured_without_fairseq(tmp_path):
    small = "--plain --layers 1 --embed-dim 8 --heads 2 --vocabulary 9 --length 4 --tokens 8 --rounds 1 --rows mha mixhead-a"
    program = "import sys, training; training.main(); assert 'fairseq' not in sys.modules"
    code = [sys.executable, "-c", program, *small.split(), "--output", tmp_path / "training.json"]
    measured = subprocess.run(code, capture_output=True, text=True, cwd=BENCHMARKS)
    assert measured.returncode == 0, measured.stderr
    rows = json.loads((tmp_path / "training.json").read_text())["results"]
    assert [row["row"] for row in rows] == ["mha", "mixhead-a"] and rows[0]["ratio"] == 1
