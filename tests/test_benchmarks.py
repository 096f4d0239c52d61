"""The benchmarks: files are refused before anything is measured, and the baseline is fairseq as it is without us."""

import argparse
import json
import re
import subprocess
import sys
import warnings
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
        ("nope", "attention method 'nope': expected one of mha"),
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


def test_sdpa_is_named_by_the_kernel_that_it_took_and_one_that_does_not_run_is_said(capsys):
    small = ["--embed-dim", "32", "--heads", "2", "--tokens", "1", "--rounds", "1", "--lengths", "8", "--operation"]
    options = attention.parse([*small, "--baseline", "sdpa-flash", "sdpa-cudnn", "--layers", "mha@blocked"])
    failed = {}
    flash, ours = attention.at_length(options, 8, failed)
    assert flash["kernel"] == "ScaledDotProductFlashAttentionForCpu" and ours["kernel"] == ""
    assert list(failed) == ["sdpa-cudnn"]
    assert (flash["baseline"], flash["ratio"], ours["baseline"]) == ("sdpa-flash", 1, "sdpa-flash")
    scores = 2 * 8 * 9 // 2
    assert ours["picoseconds_per_score"] == pytest.approx(ours["milliseconds"] * 1e9 / scores, rel=0.1)
    both = ours["forward_milliseconds"] + ours["backward_milliseconds"]
    assert both == pytest.approx(ours["milliseconds"], abs=2e-3)


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


def test_own_kernels_are_measured_by_every_backend_that_has_some():
    names = attention.with_kernels(["mixhead-a@kernels", "mha"])
    assert names == [*(f"mixhead-a@{backend}" for backend in attention.OWN_KERNELS), "mha"]
    assert "triton" in attention.OWN_KERNELS and not {"auto", "sdpa", "blocked", "reference"} & {*attention.OWN_KERNELS}


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
    def result(layer, length, time, ratio, memory=1.0):
        measured = {"picoseconds_per_score": time, "ratio": ratio, "memory_ratio": memory}
        return {"layer": layer, "length": length} | measured

    a, b = "mixhead-a@triton", "mixhead-b@triton"
    checked = {"backend": "triton", "same_bits": True}
    attend = {"backend": "triton", "composition": "mixhead-a", "heads": 16, "length": 8192, "kernel": "attend"}
    results = {
        "operation": [result(a, 2048, 7.0, 3.6), result(a, 8192, 9.0, 4.4, 1.4), result(b, 2048, 7.7, 4.0)],
        "glue": [result(a, 2048, 30.0, 2.1)],
        "heads-8": [result(a, 2048, 7.0, 3.6)],
        "passes": [
            attend | {"variant": name, "picoseconds_per_score": time} for name, time in (("one row", 1), ("", 2.5))
        ],
        "training": [
            {"row": row, "ratio": ratio} for row, ratio in (("mha", 1.0), (a, 0.8), ("mixhead-a@blocked", 0.2))
        ],
        "values-0": [checked | {"right": True}],
        "values-1": [checked | {"right": False}, {"backend": "triton", "failed": "OutOfMemoryError"}],
    }
    for name, rows in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": rows}))
    (tmp_path / "steps").write_text("values\t0\t50\npasses\t124\t60\n")
    found = gpu.gathered(tmp_path)
    assert found["steps"][1] == {"name": "passes", "status": 124, "seconds": 60}
    goals = {goal.name: (goal.measured, goal.met) for goal in gpu.goals(found)}
    assert goals == {
        "triton: wrong values, or other bits in a second run": (2, False),
        f"{a}, attend alone, n 8192: ps a score": (2.5, False),
        f"{a}, n 2048: ps a score": (7.0, True),
        f"{a}, n 8192: ps a score": (9.0, False),
        f"{a}, n 2048: time by the fastest SDPA's": (3.6, False),
        f"{a}, n 8192: time by the fastest SDPA's": (4.4, True),
        f"{a}, n 2048: the same with glue, as published before": (2.1, True),
        f"{a}, n 8192: the same with glue, as published before": (None, None),
        f"{a}, n 32768: the same with glue, as published before": (None, None),
        f"{b} by mixhead-a, n 2048: time": (pytest.approx(1.1), True),
        f"{a} with 8 heads by 16, per score, n 2048: time": (1.0, True),
        f"{a} with dropout 0.1 by none, n 2048: time": (None, None),
        "mixhead-a and -b@triton, every n: memory by SDPA's": (1.4, False),
        f"training with {a}, n 512: tokens a second by mha's": (0.8, False),
    }
    assert "not measured" in gpu.table(list(gpu.goals(found)))


@pytest.mark.parametrize("command", ["goals", "causes"])
def test_each_measurement_of_a_gpu_ends_within_nine_minutes(command):
    """The limits of its steps, and the seconds after which a step that does not end is killed."""
    goals, causes = (BENCHMARKS / "gpu.sh").read_text().split("\nelse\n")[-2:]
    part = goals.rpartition("= goals ]; then")[2] if command == "goals" else causes
    limits = [int(seconds) for seconds in re.findall(r"^ +(?:step|parallel) \S+ (\d+) ", part, re.MULTILINE)]
    assert len(limits) == {"goals": 7, "causes": 8}[command]
    kill = int(re.search(r"timeout -k (\d+) ", (BENCHMARKS / "gpu.sh").read_text())[1])
    assert sum(limits) + kill * len(limits) < 9 * 60


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


def test_a_step_of_generation_leaves_the_cache_as_it_was():
    options = transformers_layers.parse(["--embed-dim", "16", "--heads", "2", "--layers", "1", "--lengths", "5"])
    model = transformers_layers.build("llama", "mha", options)
    lengths = []
    steps = transformers_layers.generation_step(model, torch.ones(1, 5, dtype=torch.long))
    model.register_forward_hook(lambda module, args, output: lengths.append(output.past_key_values.get_seq_length()))
    steps()
    steps()
    assert lengths == 2 * list(range(6, 6 + transformers_layers.STEPS_OF_GENERATION))


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


def test_the_picture_of_layers_names_device_and_type(tmp_path):
    data = json.loads((BENCHMARKS / "results" / "attention-cpu.json").read_text(encoding="utf-8"))
    attention.picture(data["results"], tmp_path / "layers.svg", {"operation": False} | data["settings"])
    assert "float32, cpu" in (tmp_path / "layers.svg").read_text(encoding="utf-8")


def test_training_is_measured_without_fairseq(tmp_path):
    small = "--plain --layers 1 --embed-dim 8 --heads 2 --vocabulary 9 --length 4 --tokens 8 --rounds 1 --rows mha mixhead-a"
    program = "import sys, training; training.main(); assert 'fairseq' not in sys.modules"
    code = [sys.executable, "-c", program, *small.split(), "--output", tmp_path / "training.json"]
    measured = subprocess.run(code, capture_output=True, text=True, cwd=BENCHMARKS)
    assert measured.returncode == 0, measured.stderr
    rows = json.loads((tmp_path / "training.json").read_text())["results"]
    assert [row["row"] for row in rows] == ["mha", "mixhead-a"] and rows[0]["ratio"] == 1
