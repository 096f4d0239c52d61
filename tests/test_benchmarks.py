"""The benchmarks: files are refused before anything is measured, and the baseline is fairseq as it is without us."""

import json
import os
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
import jobs
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
    options = attention.parse(small)
    q, k, v = torch.randn(3, 5, 3, 2, 4, generator=torch.Generator().manual_seed(0)).transpose(2, 3).transpose(1, 3)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for name in ("sdpa", *names):
        layer = attention.build(name, options, 5)
        found = layer.call(layer.module, q, k, v)
        if name.startswith("talking"):
            assert (found - expected).abs().max() > 1e-3
        else:  # mixing starts as the unit matrix
            torch.testing.assert_close(found, expected)


def test_trials_of_blocks_compute_what_blocks_compute(monkeypatch):
    names = [f"mixhead-a@{backend}" for backend in ("blocked", *attention.BLOCKS)]
    options = attention.parse(["--shapes", "2x16", "--baseline", "sdpa", "--layers", *names, "--operation"])
    tensors = torch.randn(4, 1, 2, 150, 16, generator=torch.Generator().manual_seed(0))
    inputs, grad, found = [tensor.requires_grad_() for tensor in tensors[:3]], torch.autograd.grad, []

    def noted(output, leaves, *others, **options):
        found.append([output, *grad(output, leaves, *others, **options)])

    monkeypatch.setattr(torch.autograd, "grad", noted)
    for name in names:
        attention.build(name, options, 150).step(inputs, tensors[3], options)
    for trial in found[1:]:
        for one, expected in zip(trial, found[0], strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)
    assert len(found) == 4


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


def test_goals_are_read_from_what_was_measured(tmp_path):
    def result(layer, length, time, ratio, memory=1.0, heads=16):
        measured = {"picoseconds_per_score": time, "milliseconds": time, "ratio": ratio, "memory_ratio": memory}
        return {"layer": layer, "heads": heads, "head_dim": 64, "length": length} | measured

    a, b = "mixhead-a@tiled", "mixhead-b@tiled"
    checked = {"backend": "tiled", "same_bits": True}
    attend = {"backend": "tiled", "composition": "mixhead-a", "heads": 16, "length": 8192, "kernel": "attend"}
    results = {
        "operation": [
            *(result(a, 2048, 7.0, 3.6), result(a, 8192, 9.0, 4.4, 1.4), result("mixhead-a@triton", 8192, 25.0, 9.0)),
            *(result(a, 2048, 7.0, 2.0, heads=12), result("mixhead-a@triton", 2048, 6.0, 2.0, heads=12)),
        ],
        "others": [result(b, 2048, 7.7, 4.0)],
        "passes": [
            attend | {"variant": name, "picoseconds_per_score": time} for name, time in (("one row", 1), ("", 2.5))
        ],
        "training": [{"row": row, "ratio": ratio} for row, ratio in (("mha", 1.0), (a, 0.8), (b, 0.2))],
        "values-0": [checked | {"right": True}, {"backend": "tiled", "refused": "mixing of 32 heads of 128"}],
        "kinds-1": [checked | {"right": False}, {"backend": "tiled", "failed": "OutOfMemoryError"}],
    }
    for name, rows in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": rows}))
    (tmp_path / "steps").write_text("values\t0\t50\npasses\t124\t60\n")
    found = gpu.gathered(tmp_path)
    assert found["steps"][1] == {"name": "passes", "status": 124, "seconds": 60}
    goals = {goal.name: (goal.measured, goal.met) for goal in gpu.goals(found)}
    of = "16 heads of 64, mixhead-"
    assert goals == {
        "tiled: wrong values, or other bits in a second run": (2, False),
        "tiled: shapes and lengths where triton is as fast or faster": (1, False),
        f"{of}a, attend alone, n 8192: ps a score": (2.5, False),
        f"{of}a, n 2048: ps a score": (7.0, True),
        f"{of}a, n 8192: ps a score": (9.0, False),
        f"{of}b, n 2048: ps a score": (7.7, True),
        f"{of}b, n 8192: ps a score": (None, None),
        f"{of}a, n 2048: time by the fastest SDPA's": (3.6, False),
        f"{of}a, n 8192: time by the fastest SDPA's": (4.4, True),
        "tiled: memory by SDPA's": (1.4, False),
        "training with mixhead-a, n 512: tokens a second by mha's": (0.8, False),
    }
    assert "not measured" in gpu.table(list(gpu.goals(found)))


def test_all_measurements_of_a_gpu_end_within_eight_minutes():
    """The limits of the steps, and the seconds after which a step that does not end is killed."""
    script = (BENCHMARKS / "gpu.sh").read_text()
    limits = [int(seconds) for seconds in re.findall(r"^(?:step|parallel) \S+ (\d+) ", script, re.MULTILINE)]
    kill = int(re.search(r"timeout -k (\d+) ", script)[1])
    assert len(limits) == 8 and sum(limits) + kill * len(limits) < 8 * 60


@pytest.mark.usefixtures("quick_starts")
def test_measurements_of_a_gpu_run_on_a_cpu(tmp_path):
    """Each step ends, its results are in the file, and the kernels are right."""
    pytest.importorskip("triton", "3.3")
    command = [BENCHMARKS / "gpu.sh", tmp_path]
    run = subprocess.run(command, env=os.environ | {"DEVICE": "cpu"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    found = json.loads((tmp_path / "gpu-sets.json").read_text())
    steps = ["values", "kinds", "operation", "others", "training", "layer", "compile", "passes"]
    assert [step["name"] for step in found["steps"]] == steps
    files = [*(f"{name}-0" for name in steps[:2]), *steps[2:6], "passes"]
    assert all(found[name]["results"] for name in files)
    assert {row["backend"] for row in found["values-0"]["results"] if row["right"]} == {"tiled", "triton"}
    assert {row["layer"] for row in found["operation"]["results"]} == {
        "sdpa-flash",
        "mixhead-a@tiled",
        "mixhead-a@triton",
    }
    assert found["goals"][0]["met"]


def test_the_table_of_jobs_replaces_that_of_the_page(tmp_path, capsys, monkeypatch):
    row = {
        "job": "generate",
        "row": "mha",
        "rounds": 3,
        "seconds": 4.0,
        "ratio": 1.04,
        "cpu_seconds": 9,
        "mebibytes": 1234,
    }
    shares = {"linear layers": 0.5, "other": 0.3, "attention": 0.15, "loss": 0.05}
    start = {"job": "quickstart", "seconds": 61.2, "cpu_seconds": 110.4, "bleu": {"mixhead-a": 95.1, "mha": 94.9}}
    (tmp_path / "jobs.json").write_text(json.dumps({"results": [row | {"kinds": shares}, start]}))
    page = tmp_path / "page.md"
    page.write_text("before\n\n| job | attention | time |\n| --- | --- | --- |\n| old | row | 1 |\n\nafter\n")
    monkeypatch.setattr(sys, "argv", ["jobs.py", "--table", str(tmp_path / "jobs.json"), "--page", str(page)])
    jobs.main()
    shown = capsys.readouterr().out
    assert page.read_text() == f"before\n\n{shown}\nafter\n"
    assert "| generate | `mha` | 1.04 | 4.0 | 1,234 | linear layers 50 %, other 30 %, attention 15 % |" in shown
    assert "| quickstart | both | – | 61 (110 of CPU) | – | BLEU: mixhead-a 95.1, mha 94.9 |" in shown


@pytest.mark.parametrize("what", ["training", "generation"])
def test_a_small_llama_is_timed_after_its_first_step(what, capsys, monkeypatch):
    monkeypatch.setattr(torch, "randint", lambda most, size: torch.zeros(2, 16, dtype=torch.long))
    jobs.child(["llama", "mixhead-a", what, "1"], profile=True)
    seconds, kinds = capsys.readouterr().out.splitlines()[-2:]
    assert float(seconds.removeprefix("seconds ")) > 0
    assert sum(json.loads(kinds.removeprefix("kinds ")).values()) == pytest.approx(1, abs=0.01)


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
