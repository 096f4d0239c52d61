"""What ``auto`` chooses: never a T×T tensor where sequences are long, whatever the call wants, and only backends that run."""

import importlib
import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attention_problems import LargestTensor, attend, call_of, leaves, mixing_of

from fairseq_lowrank.ops import AttentionMask, PositionwiseMixing, StaticMixing
from fairseq_lowrank.ops.attention import auto, gpu_times

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
    "bias": AttentionMask(True, additive=torch.zeros(LENGTH)),
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


def taken(call):
    """Names of backends in the order of the rule, of those that can compute ``call`` on some device."""
    names = [name for row in auto.RULE if row.fits(call) for name in row.backends]
    return [name for name in names if auto.BACKENDS[name].unsupported_reason(call) is None]


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
    chosen = taken(call)[0]
    assert chosen != "reference"
    if chosen == "sdpa":
        assert not auto.sdpa.needs_causal_tensor(call)


def on_gpu(dtype=torch.bfloat16, device_type="cuda", rules=("static", "static"), mask="causal", heads=8, queries=16, **changes):  # fmt: skip
    """What ``auto`` takes for a call on a stand-in for a GPU."""
    sizes = {"q": 32, "k": 32, "v": 32} | changes.pop("dims", {})
    groups = {"q": heads, "k": heads, "v": heads} | changes.pop("groups", {})
    lengths = {"q": queries, "k": 16, "v": 16}
    built = {name: torch.zeros(1, groups[name], lengths[name], sizes[name]) for name in "qkv"}
    scores = (1, heads, queries, 16)
    built |= {"mask": MASKS[mask]} | changes
    before, after = (mixing_of(rule, torch.zeros, scores) for rule in rules)
    call = operation_call(built | {"score_mixing": before, "prob_mixing": after}, device_type)
    call.v.dtype = dtype
    return taken(call)[0]


def test_on_a_gpu_half_precision_takes_the_kernels():
    """Whether they are right there is asked when they are first used."""
    accepted = [
        {},
        {"dtype": torch.float16},
        {"rules": ("none", "positionwise"), "mask": "none"},
        {"rules": ("none", "static"), "heads": 16, "dims": dict.fromkeys("qkv", 64), "dropout_p": 0.1},
        {"rules": ("none", "static"), "heads": 12, "dims": dict.fromkeys("qkv", 64)},
        {"rules": ("none", "none"), "activation": "sigsoftmax"},
        {"rules": ("none", "none"), "mask": "causal and padding"},
        {"rules": ("none", "diagonal"), "activation": "sigsoftmax"},
        {"dropout_p": 0.1},
        {"rules": ("none", "static"), "activation": "sigsoftmax"},
        {"mask": "appended"},
        {"mask": "beams"},
        {"mask": "window"},
        {"mask": "bias"},
        {"heads": 4},
        {"heads": 32},
        {"groups": {"k": 2}},
        {"groups": {"v": 1}},
        {"dims": dict.fromkeys("qkv", 128)},
        {"dims": {"v": 64}},
        {"rules": ("static", "none")},
        {"rules": ("diagonal", "static")},
    ]
    assert [on_gpu(**change) for change in accepted] == ["tiled"] * len(accepted)
    for other in (
        {"dtype": torch.float32},
        {"device_type": "cpu", "heads": 32},
        {"mask": "documents"},
        {"heads": 33},
        {"dims": dict.fromkeys("qkv", 136)},
    ):
        assert on_gpu(**other) == "blocked"
    assert on_gpu(rules=("none", "none")) == "sdpa"
    assert on_gpu(queries=1) == on_gpu(need_weights=True) == "reference"
    assert on_gpu(rules=("none", "none"), activation="sigsoftmax", dims=dict.fromkeys("qkv", 24)) == "triton"


def test_a_traced_call_on_a_gpu_takes_the_kernels(monkeypatch):
    """It is not tried on the device before it runs."""
    monkeypatch.setattr(auto, "is_traced", lambda tensor: True)
    monkeypatch.setattr(auto.triton, "device_unsupported_reason", lambda device, dtype: None)
    monkeypatch.setattr(auto, "_is_right_here", lambda name, call: pytest.fail("it is traced"))
    on_cuda = operation_call(mixed(groups=(4, 4)), "cuda")
    on_cuda.v.dtype = torch.bfloat16
    assert auto.fastest(on_cuda) == "tiled"
    assert on_gpu(rules=("none", "none")) == "sdpa" and on_gpu(queries=1) == "tiled"


@pytest.mark.parametrize(
    ("results", "chosen"),
    [
        ({"tiled": (None,)}, "tiled"),
        ({"tiled": ("OutOfResources: 268288", False), "triton": (None,)}, "triton"),
        ({"tiled": ("q by 0.3",), "triton": ("OutOfResources: 268288", False)}, "blocked"),
    ],
)
def test_kernels_that_are_wrong_or_do_not_fit_here_are_passed_over(results, chosen, monkeypatch):
    """Those that are wrong are named in a warning."""
    pytest.importorskip("triton")
    from fairseq_lowrank.ops.attention import selfcheck

    monkeypatch.setattr(auto, "_kind", lambda call: "cuda")
    monkeypatch.setattr(auto.triton, "device_unsupported_reason", lambda device, dtype: None)
    monkeypatch.setattr(selfcheck, "checked", lambda call, name: selfcheck.SelfCheckResult(*results[name]))
    monkeypatch.setattr(selfcheck, "_warned", set())
    call = call_of(**{name: torch.zeros(1, 2, 16, 32).bfloat16() for name in "qkv"}, activation="sigsoftmax")
    wrong = [name for name, result in results.items() if result[0] and len(result) == 1]
    with pytest.warns(RuntimeWarning, match=f"the {wrong[0]} kernels cannot be used") if wrong else nullcontext():
        assert auto.fastest(call) == chosen


def test_the_choice_on_a_gpu_is_traced_for_any_number_of_heads(monkeypatch):
    monkeypatch.setattr(auto, "_kind", lambda call: "cuda")
    monkeypatch.setattr(auto.triton, "device_unsupported_reason", lambda device, dtype: None)

    def number(x, weight):
        call = call_of(x, x, x, mask=AttentionMask(True), prob_mixing=StaticMixing(weight))
        return x * (auto.fastest(call) == "tiled")

    run = torch.compile(number, dynamic=True, backend="eager", fullgraph=True)
    for heads, tiled in ((16, 1), (8, 1), (33, 0)):
        assert run(torch.ones(1, heads, 3, 64).bfloat16(), torch.eye(heads)).max() == tiled


def test_the_rule_takes_what_was_measured_as_the_fastest(monkeypatch):
    """In every cell. A cell that says otherwise needs a separate row."""
    monkeypatch.setattr(auto.sdpa, "is_fused", lambda call: True)
    for cell, cost in gpu_times.MEASURED.items():
        sizes = (1, cell.heads, 1024, cell.dim)
        kinds = {StaticMixing: "static", PositionwiseMixing: "positionwise", None: "none"}
        before, after = (mixing_of(kinds[rule], torch.zeros, (1, cell.heads, 1024, 1024)) for rule in cell[:2])
        built = {name: torch.zeros(sizes, device="meta") for name in "qkv"} | {"mask": MASKS["causal"]}
        built |= {"score_mixing": before, "prob_mixing": after, "activation": cell.activation}
        call = operation_call(built, "cuda")
        call.v.dtype = torch.bfloat16
        assert taken(call)[0] == gpu_times.fastest(call) == min(cost, key=cost.get)
        assert gpu_times.describe(call).startswith(f"measured, picoseconds a score: {taken(call)[0]} ")
        assert gpu_times.fastest(call.replace(dropout_p=0.1)) is None


def test_the_page_shows_the_rule():
    """The table of docs/kernels.md has the rows of the code."""
    page = (Path(__file__).resolve().parents[3] / "docs/kernels.md").read_text()
    rows = [f"| {', '.join(f'`{name}`' for name in row.backends)} | {row.calls} |" for row in auto.RULE]
    assert "\n".join(rows) in page


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
    monkeypatch.setattr(auto.triton, "device_unsupported_reason", lambda device, dtype: "triton is not installed")
    monkeypatch.setattr(auto.sdpa, "is_fused", lambda call: True)


def chosen_on_a_gpu(built, dtype=torch.bfloat16, device_type="cuda"):
    call = operation_call(built, device_type)
    call.v.dtype = dtype
    runs = (name for name in taken(call) if auto.BACKENDS[name].device_unsupported_reason(device_type, dtype) is None)
    return next(runs)


def mixed(mask="causal", groups=(4, 4), rules=("none", "static"), length=512, dim=64, **options):
    built = problem(mask, groups, "softmax", rules, 0.0, length)
    sizes = {"q": 4, "k": groups[0], "v": groups[1]}
    return built | {name: torch.zeros(1, heads, length, dim) for name, heads in sizes.items()} | options


def test_on_a_gpu_without_triton_pytorchs_kernels_mix_where_they_have_few_columns_to_read(without_triton):
    assert chosen_on_a_gpu(mixed()) == "sdpa"
    assert chosen_on_a_gpu(mixed(mask="none", groups=(1, 1), length=128)) == "sdpa"
    assert chosen_on_a_gpu(mixed(groups=(4, 2), dim=128)) == "sdpa"
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
        assert chosen_on_a_gpu(other) == "blocked"
    assert chosen_on_a_gpu(mixed(), torch.float32) == "blocked"
    assert chosen_on_a_gpu(mixed(), device_type="cpu") == "blocked"
    assert chosen_on_a_gpu(mixed(need_weights=True)) == "reference"


def test_on_a_gpu_whose_pytorch_would_build_all_weights_blocks_mix(without_triton, monkeypatch):
    monkeypatch.setattr(auto.sdpa, "is_fused", lambda call: False)
    assert chosen_on_a_gpu(mixed()) == "blocked"


def test_on_a_gpu_our_kernels_mix_where_they_run(without_triton, monkeypatch):
    monkeypatch.setattr(auto.triton, "device_unsupported_reason", lambda device, dtype: None)
    assert chosen_on_a_gpu(mixed()) == "sdpa"  # as measured
    assert chosen_on_a_gpu(mixed(dim=32)) == "tiled"
    assert chosen_on_a_gpu(mixed(mask="padding", length=1024)) == "tiled"
    assert chosen_on_a_gpu(mixed(groups=(1, 1), dim=160)) == "sdpa"


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
    assert taken(call)[0] == chosen


@pytest.mark.parametrize(
    ("threads", "dim", "length", "mask", "chosen"),
    [
        (1, 64, 255, "causal", "sdpa"),
        (1, 64, 256, "causal", "blocked"),
        (1, 64, 256, "none", "sdpa"),
        (1, 64, 1025, "causal", "sdpa"),
        (1, 32, 512, "causal", "blocked"),
        (1, 32, 513, "causal", "sdpa"),
        (2, 64, 256, "causal", "sdpa"),
        (2, 128, 256, "causal", "blocked"),
        (3, 128, 256, "causal", "sdpa"),
    ],
)
def test_blocks_are_taken_by_threads_and_head_size(threads, dim, length, mask, chosen, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    built = problem(mask, (4, 4), "softmax", ("none", "none"), 0.0, length, dim)
    assert taken(operation_call(built, "cpu"))[0] == chosen
    assert taken(operation_call(built | {name: built[name].double() for name in "qkv"}, "cpu"))[0] == "sdpa"


@pytest.mark.parametrize("groups", [4, 1])
@pytest.mark.parametrize("mask", ["causal", "none"])
def test_a_single_query_without_mixing_takes_no_blocks(groups, mask):
    built = problem(mask, (groups, groups), "softmax", ("none", "none"), 0.0, 256, dim=4)
    built["q"] = built["q"][:, :, :1]
    assert taken(operation_call(built, "cpu"))[0] == "sdpa"


@pytest.mark.parametrize("groups", [4, 1])
def test_all_scores_of_a_single_query_are_computed_at_once(groups):
    built = problem("none", (groups, groups), "softmax", ("none", "static"), 0.0)
    built["q"] = built["q"][:, :, :1]
    assert taken(operation_call(built, "cpu"))[0] == "reference"


@pytest.mark.parametrize("mixing", ["none", "static"])
def test_a_traced_call_has_one_choice_for_all_lengths(mixing):
    built = problem("none", (4, 4), "softmax", ("none", mixing), 0.0)
    choices = []
    for queries in (LENGTH, 1):
        built["q"] = built["q"][:, :, :queries]
        choices.append(taken(call_of(**built).map_tensors(lambda tensor: tensor.to("meta"))))
    assert choices[0] == choices[1]


def test_a_backend_that_does_not_run_here_is_passed_over_and_refused_by_name(monkeypatch):
    built = problem("causal", (4, 4), "softmax", ("none", "none"), 0.0)
    expected, _ = attend(**built, backend="blocked")
    monkeypatch.setattr(auto.sdpa, "device_unsupported_reason", lambda device, dtype: "it wants another")
    monkeypatch.setattr(auto.sdpa, "compute", lambda call: pytest.fail("it does not run"))
    torch.testing.assert_close(attend(**built)[0], expected)
    with pytest.raises(
        ValueError, match=r"backend='sdpa' does not run on cpu in torch\.float32: it wants another; use"
    ):
        attend(**built, backend="sdpa")
    # on a GPU the message names what "auto" takes
    call = call_of(**{name: torch.zeros(1, 2, 3, 4, device="meta") for name in "qkv"})
    on_gpu = operation_call({"q": call.scores.q, "k": call.scores.k, "v": call.v}, "cuda")
    with pytest.raises(ValueError, match=r"it wants another; use backend='auto', which takes 'blocked'$"):
        operation.check_device("sdpa", on_gpu)
