"""What ``auto`` chooses: never a T×T tensor where sequences are long, whatever the call wants, and only backends that run."""

import importlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attention_problems import LargestTensor, attend, call_of, leaves, mixing_of

from fairseq_lowrank.ops import AttentionMask, PositionwiseMixing, StaticMixing
from fairseq_lowrank.ops.attention import gpu_times

operation = importlib.import_module("fairseq_lowrank.ops.attention")  # its function has the same name in ops
HEADS, DIM, LENGTH = 4, 2, 1024
MASKS = {
    "none": AttentionMask(),
    "causal": AttentionMask(True),
    "padding": AttentionMask(False, torch.arange(LENGTH)[None] < 3),
    "documents": AttentionMask(True, documents=torch.arange(LENGTH)[None] // 3),
    "causal and padding": AttentionMask(True, torch.arange(LENGTH)[None] < 3),
    "appended": AttentionMask(True, num_appended_keys=1),
    "beams": AttentionMask(True, query_repeats=4),
    "window": AttentionMask(True, window=100),
}
RULES = [("none", "none"), ("static", "static"), ("none", "positionwise"), ("none", "diagonal")]
CASES = list(
    itertools.product(MASKS, [(4, 4), (2, 2), (1, 1), (1, 4), (2, 1)], ["softmax", "sigsoftmax"], RULES, [0.0, 0.1])
)


def problem(mask, groups, activation, rules, dropout_p, length=LENGTH, dim=DIM):
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(shape, generator=generator).requires_grad_()

    scores = (1, HEADS, length, length)
    return {
        "q": normal(1, HEADS, length, dim),
        "k": normal(1, groups[0], length, dim),
        "v": normal(1, groups[1], length, dim),
        "mask": MASKS[mask],
        "activation": activation,
        "score_mixing": mixing_of(rules[0], normal, scores),
        "prob_mixing": mixing_of(rules[1], normal, scores),
        "dropout_p": dropout_p,
    }


@pytest.mark.parametrize("case", CASES[::7], ids=str)
def test_auto_makes_no_tensor_of_all_scores(case):
    built = problem(*case)
    with LargestTensor() as largest:
        heads, _ = attend(**built)
        torch.autograd.grad(heads.sum(), list(leaves(built).values()))
    assert largest.bytes < 4 * LENGTH**2  # those of one head


@pytest.mark.parametrize("value_dim", [1, 8])
@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_auto_makes_no_tensor_of_all_scores_where_values_have_another_size(mask, value_dim):
    built = problem(mask, (4, 4), "softmax", ("none", "none"), 0.0)
    built["v"] = torch.ones(1, HEADS, LENGTH, value_dim, requires_grad=True)
    with LargestTensor() as largest:
        attend(**built)[0].sum().backward()
    assert largest.bytes < 4 * LENGTH**2


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "a device that was not measured"])
@pytest.mark.parametrize("case", CASES[::11], ids=str)
def test_what_auto_prefers_anywhere_can_be_computed_in_linear_memory(case, device_type):
    """Asked of a stand-in for the device: the choice reads shapes and the kind of device alone."""
    call = operation_call(problem(*case), device_type)
    chosen = next(module for module in operation._preference(call) if module.unsupported_reason(call) is None)
    assert chosen is not operation.reference
    if chosen is operation.sdpa:
        assert not operation.sdpa.needs_causal_tensor(call)


def test_on_a_gpu_half_precision_takes_the_kernels():
    """Whether they keep their registers there is asked when they are first used."""

    def first(dtype=torch.bfloat16, device_type="cuda", rules=("static", "static"), mask="causal", heads=8, **changes):
        def heads_of(groups, dim):
            return torch.zeros(1, groups, 16, dim)

        sizes = {"q": 32, "k": 32, "v": 32} | changes.pop("dims", {})
        groups = {"q": heads, "k": heads, "v": heads} | changes.pop("groups", {})
        built = {name: heads_of(groups[name], sizes[name]) for name in "qkv"} | {"mask": MASKS[mask]} | changes
        scores = (1, heads, 16, 16)
        built |= {
            name: mixing_of(rule, torch.zeros, scores)
            for name, rule in zip(("score_mixing", "prob_mixing"), rules, strict=True)
        }
        call = operation_call(built, device_type)
        call.v.dtype = dtype
        return next(module for module in operation._preference(call) if module.unsupported_reason(call) is None)

    taken = [
        {},
        {"dtype": torch.float16},
        {"rules": ("none", "positionwise"), "mask": "none"},
        {"rules": ("none", "static"), "heads": 16, "dims": dict.fromkeys("qkv", 64), "dropout_p": 0.1},
        {"rules": ("none", "none"), "activation": "sigsoftmax"},
        {"rules": ("none", "none"), "mask": "causal and padding"},
        {"rules": ("none", "diagonal"), "activation": "sigsoftmax"},
        {"dropout_p": 0.1},
        {"rules": ("none", "static"), "activation": "sigsoftmax"},
        {"mask": "appended"},
        {"mask": "beams"},
        {"heads": 4},
        {"heads": 32},
        {"groups": {"k": 2}},
        {"groups": {"v": 1}},
        {"dims": dict.fromkeys("qkv", 128)},
        {"dims": {"v": 64}},
        {"rules": ("static", "none")},
        {"rules": ("diagonal", "static")},
    ]
    assert [first(**change) for change in taken] == [operation.triton] * len(taken)
    not_taken = [
        {"dtype": torch.float32},
        {"device_type": "cpu"},
        {"mask": "window"},
        {"heads": 33},
        {"dims": dict.fromkeys("qkv", 136)},
    ]
    assert operation.triton not in [first(**change) for change in not_taken]
    assert first(rules=("none", "none")) is operation.sdpa
    measured = {"rules": ("none", "static"), "heads": 16, "dims": dict.fromkeys("qkv", 64)}
    assert first(**measured) is operation.tiled and first(**measured, dtype=torch.float32) is operation.blocked


def test_a_traced_call_on_a_gpu_takes_only_kernels_that_were_timed_or_compiled(monkeypatch):
    """It is not tried on the device. What was compiled is in benchmarks/results/kernels.json."""
    monkeypatch.setattr(operation, "is_traced", lambda tensor: True)

    def kernels_of(heads, dim, **options):
        built = problem("causal", (heads, heads), "softmax", ("none", "none"), 0.0, 16)
        built |= {name: torch.zeros(1, heads, 16, dim) for name in "qkv"}
        built["prob_mixing"] = StaticMixing(torch.eye(heads))
        return chosen_on_a_gpu(built | options)

    monkeypatch.setattr(operation.triton, "device_unsupported_reason", lambda device, dtype: None)
    assert kernels_of(16, 64) is kernels_of(8, 64) is operation.tiled
    assert kernels_of(16, 32) is operation.triton
    assert kernels_of(4, 64) is kernels_of(16, 128) is kernels_of(16, 64, dropout_p=0.1) is operation.blocked


def test_the_choice_on_a_gpu_is_traced_for_any_number_of_heads():
    def number(x, weight):
        call = call_of(x, x, x, mask=AttentionMask(True), prob_mixing=StaticMixing(weight))
        return x * len(gpu_times.kernels(call))

    run = torch.compile(number, dynamic=True, backend="eager", fullgraph=True)
    for heads, kernels in ((16, 2), (8, 2), (4, 1)):
        assert run(torch.ones(1, heads, 3, 64), torch.eye(heads)).max() == kernels


def test_the_choice_on_a_gpu_is_what_was_measured_or_predicted():
    """Two measured cells decide between the kernels and SDPA for each value; a prediction has to be clear."""
    measured, other = mixed(groups=(4, 4)), mixed(groups=(4, 4), dim=32)
    assert gpu_times.is_measured(call_of(**measured)) and not gpu_times.is_measured(call_of(**other))
    assert "measured, picoseconds a score: sdpa 21.5, triton 85.0" in gpu_times.reason(call_of(**measured), "sdpa")
    assert gpu_times.reason(call_of(**other), "sdpa").startswith("sdpa (predicted")
    eight = call_of(**{name: torch.zeros(1, 8, 512, 32) for name in "qkv"}, prob_mixing=StaticMixing(torch.eye(8)))
    cost = gpu_times.times(eight)
    assert cost["sdpa"] < cost["triton"] and not gpu_times.prefers_sdpa(eight)  # within the error
    assert not gpu_times.is_measured(call_of(**measured | {"dropout_p": 0.1}))


def test_the_kernels_are_taken_by_a_table_of_measured_times(monkeypatch):
    """A made-up cell decides, and says why. Calls that no cell has take what was taken before."""
    monkeypatch.setattr(operation.sdpa, "is_fused", lambda call: False)
    call = call_of(**mixed(dim=32))
    assert gpu_times.kernels(call) == ["triton"]
    for tiled, wanted in ((7.0, ["tiled", "triton"]), (9.0, ["triton", "tiled"])):
        monkeypatch.setitem(gpu_times.MEASURED, gpu_times.cell(call), {"triton": 8.0, "tiled": tiled})
        assert gpu_times.kernels(call) == wanted and not gpu_times.prefers_sdpa(call)
        on_gpu = operation_call(mixed(dim=32), "cuda")
        on_gpu.v.dtype = torch.bfloat16
        first, second, *_ = operation._preference(on_gpu)
        assert [first, second] == [getattr(operation, name) for name in wanted]
    assert gpu_times.reason(call, "triton") == "triton (measured, picoseconds a score: triton 8.0, tiled 9.0)"


RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"


def test_the_measured_times_are_those_of_the_file():
    file = RESULTS / "gpu.json"
    found = {}
    for part in ("operation", "few-heads"):
        run = json.loads(file.read_text())[part]
        heads = run["settings"]["heads"]
        for line in run["results"]:
            length = line["length"]
            scores = line["batch"] * heads * length * (length + 1) / 2
            found[heads, line["layer"], length] = line["milliseconds"] * 1e9 / scores
    layers = {"mixhead-a": StaticMixing, "mixhead-b": PositionwiseMixing}
    for layer, rule in layers.items():
        for heads, length in ((16, 8192), (4, 8192)):
            cell = gpu_times.Cell(None, rule, "softmax", heads, 64)
            for backend, picoseconds in gpu_times.MEASURED.get(cell, {}).items():
                if (heads, f"{layer}@{backend}", length) in found:
                    assert picoseconds == pytest.approx(found[heads, f"{layer}@{backend}", length], abs=0.1)


@pytest.fixture
def without_triton(monkeypatch):
    monkeypatch.setattr(operation.triton, "device_unsupported_reason", lambda device, dtype: "triton is not installed")
    monkeypatch.setattr(operation.sdpa, "is_fused", lambda call: True)


def chosen_on_a_gpu(built, dtype=torch.bfloat16, device_type="cuda"):
    call = operation_call(built, device_type)
    call.v.dtype = dtype
    candidates = (module for module in operation._preference(call) if module.unsupported_reason(call) is None)
    return next(module for module in candidates if module.device_unsupported_reason(device_type, dtype) is None)


def mixed(mask="causal", groups=(4, 4), rules=("none", "static"), length=512, dim=64, **options):
    built = problem(mask, groups, "softmax", rules, 0.0, length)
    sizes = {"q": 4, "k": groups[0], "v": groups[1]}
    return built | {name: torch.zeros(1, heads, length, dim) for name, heads in sizes.items()} | options


def test_on_a_gpu_without_triton_pytorchs_kernels_mix_where_they_have_few_columns_to_read(without_triton):
    assert chosen_on_a_gpu(mixed()) is operation.sdpa
    assert chosen_on_a_gpu(mixed(mask="none", groups=(1, 1), length=128)) is operation.sdpa
    assert chosen_on_a_gpu(mixed(groups=(4, 2), dim=128)) is operation.sdpa
    for other in (
        mixed(length=511),
        mixed(dim=72, length=1024),
        mixed(mask="padding", length=1024),
        mixed(score_bias=torch.zeros(1, 512)),
        mixed(distance_bias=torch.zeros(1, 1, 1023)),
        mixed(sinks=torch.zeros(4)),
        mixed(mask="documents"),
        mixed(rules=("none", "positionwise")),
        mixed(rules=("static", "static")),
        mixed(activation="sigsoftmax"),
        mixed(dropout_p=0.1),
    ):
        assert chosen_on_a_gpu(other) is operation.blocked
    assert chosen_on_a_gpu(mixed(), torch.float32) is operation.blocked
    assert chosen_on_a_gpu(mixed(), device_type="cpu") is operation.blocked
    assert chosen_on_a_gpu(mixed(need_weights=True)) is operation.reference


def test_on_a_gpu_whose_pytorch_would_build_all_weights_blocks_mix(without_triton, monkeypatch):
    monkeypatch.setattr(operation.sdpa, "is_fused", lambda call: False)
    assert chosen_on_a_gpu(mixed()) is operation.blocked


def test_on_a_gpu_our_kernels_mix_where_they_run(without_triton, monkeypatch):
    monkeypatch.setattr(operation.triton, "device_unsupported_reason", lambda device, dtype: None)
    assert chosen_on_a_gpu(mixed()) is operation.sdpa  # as measured
    assert chosen_on_a_gpu(mixed(mask="padding", length=1024)) is operation.triton
    assert chosen_on_a_gpu(mixed(groups=(1, 1), dim=160)) is operation.sdpa


def operation_call(built, device_type):
    call = call_of(**built)
    v = SimpleNamespace(device=SimpleNamespace(type=device_type), dtype=call.v.dtype, size=call.v.size, is_meta=False)
    object.__setattr__(call, "v", v)
    return call


@pytest.mark.parametrize(
    ("rules", "groups", "dim", "length", "mask", "chosen"),
    [
        (("none", "static"), (4, 4), 8, 31, "causal", "reference"),
        (("none", "static"), (4, 4), 8, 32, "causal", "blocked"),
        (("none", "static"), (1, 1), 8, 8, "causal", "blocked"),
        (("none", "none"), (4, 4), 16, 32, "none", "sdpa"),
        (("none", "none"), (1, 1), 16, 255, "causal", "sdpa"),
        (("none", "none"), (1, 1), 16, 256, "causal", "blocked"),
        (("none", "none"), (1, 1), 16, 1024, "causal", "sdpa"),
        (("none", "none"), (4, 4), 8, 15, "causal", "sdpa"),
        (("none", "none"), (4, 4), 8, 16, "causal", "blocked"),
        (("none", "none"), (4, 4), 8, 2048, "causal", "blocked"),
        (("none", "none"), (4, 4), 8, 2049, "causal", "sdpa"),
        (("none", "none"), (4, 4), 8, 512, "none", "blocked"),
        (("none", "none"), (4, 4), 8, 513, "none", "sdpa"),
        (("none", "none"), (4, 4), 9, 128, "causal", "sdpa"),
    ],
)
def test_on_a_cpu_the_choice_is_that_of_the_page_on_performance(rules, groups, dim, length, mask, chosen):
    call = operation_call(problem(mask, groups, "softmax", rules, 0.0, length, dim), "cpu")
    found = next(backend for backend in operation._preference(call) if backend.unsupported_reason(call) is None)
    assert found is getattr(operation, chosen)


@pytest.mark.parametrize("groups", [4, 1])
@pytest.mark.parametrize("mask", ["causal", "none"])
def test_a_single_query_without_mixing_takes_no_blocks(groups, mask):
    built = problem(mask, (groups, groups), "softmax", ("none", "none"), 0.0, 256, dim=4)
    built["q"] = built["q"][:, :, :1]
    assert operation._preference(operation_call(built, "cpu"))[0] is operation.sdpa


@pytest.mark.parametrize("groups", [4, 1])
def test_all_scores_of_a_single_query_are_computed_at_once(groups):
    built = problem("none", (groups, groups), "softmax", ("none", "static"), 0.0)
    built["q"] = built["q"][:, :, :1]
    assert operation._preference(operation_call(built, "cpu"))[0] is operation.reference


@pytest.mark.parametrize("mixing", ["none", "static"])
def test_a_traced_call_has_one_choice_for_all_lengths(mixing):
    built = problem("none", (4, 4), "softmax", ("none", mixing), 0.0)
    choices = []
    for queries in (LENGTH, 1):
        built["q"] = built["q"][:, :, :queries]
        choices.append(operation._preference(call_of(**built).map_tensors(lambda tensor: tensor.to("meta"))))
    assert choices[0] == choices[1]


def test_a_backend_that_does_not_run_here_is_passed_over_and_refused_by_name(monkeypatch):
    built = problem("causal", (4, 4), "softmax", ("none", "none"), 0.0)
    expected, _ = attend(**built, backend="blocked")
    monkeypatch.setattr(operation.sdpa, "device_unsupported_reason", lambda device, dtype: "it wants another")
    monkeypatch.setattr(operation.sdpa, "compute", lambda call: pytest.fail("it does not run"))
    torch.testing.assert_close(attend(**built)[0], expected)
    with pytest.raises(
        ValueError, match=r"backend='sdpa' does not run on cpu in torch\.float32: it wants another; use"
    ):
        attend(**built, backend="sdpa")
    # on a GPU the message names what "auto" takes
    monkeypatch.setitem(operation._PREFERENCES, "cpu", operation._PREFERENCES["cuda"])
    with pytest.raises(ValueError, match=r"it wants another; use backend='auto', which takes 'blocked'$"):
        attend(**built, backend="sdpa")
