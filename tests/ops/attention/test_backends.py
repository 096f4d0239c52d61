"""Every backend computes what the reference computes: values, gradients and dropout."""

import pytest
import torch
import torch.nn.functional as F
from attention_problems import MIXINGS, attend, leaves, mixing_of, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_lowrank.ops import BACKENDS, AttentionMask, StaticMixing
from fairseq_lowrank.ops.activation import ACTIVATIONS
from fairseq_lowrank.ops.attention.tree import TensorTree

# What a backend computes, where that is not everything.
COVERAGE = {"sdpa": {"activations": ("softmax",), "mixings": MIXINGS, "befores": ("none",), "sinks": False}}
# The kernels of triton run on a GPU, and not in float64: test_triton.py.
BACKENDS = tuple(backend for backend in BACKENDS if backend not in ("triton", "tiled"))
FAST = [backend for backend in BACKENDS if backend != "reference"]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 6e-2}


def values_and_gradients(problem, backend, **options):
    heads, _ = attend(**problem, **options, backend=backend)
    cotangent = torch.randn(heads.shape, generator=torch.Generator().manual_seed(0)).to(heads)
    parts = leaves(problem)
    gradients = torch.autograd.grad(heads, list(parts.values()), cotangent, allow_unused=True, materialize_grads=True)
    return {"heads": heads.detach(), **dict(zip(parts, gradients, strict=True))}


def assert_same(actual, expected, tolerance):
    for name, value in expected.items():
        assert actual[name].isfinite().all(), name
        scale = max(1.0, value.abs().max().item())
        torch.testing.assert_close(
            actual[name].double() / scale,
            value.double() / scale,
            rtol=0,
            atol=tolerance,
            msg=lambda message, name=name: f"{name}: {message}",
        )


@pytest.mark.parametrize("backend", FAST)
@settings(max_examples=100)
@given(data=st.data())
def test_values_and_gradients_are_the_references(backend, data, device):
    problem = data.draw(problems(device, **COVERAGE.get(backend, {})))
    expected = values_and_gradients(problem, "reference")
    assert_same(values_and_gradients(problem, backend), expected, TOLERANCE[torch.float64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25)
@given(data=st.data())
def test_narrow_dtypes_stay_near_float64(backend, dtype, data, device):
    problem = data.draw(problems(device, **COVERAGE.get(backend, {}), dtype=dtype))
    exact = {name: wide(part) for name, part in problem.items()}
    expected = values_and_gradients(exact, "reference")
    actual = values_and_gradients(problem, backend)
    assert actual["heads"].dtype == dtype
    assert_same(actual, expected, TOLERANCE[dtype])


def wide(part):
    """The same numbers in float64."""
    if torch.is_tensor(part):
        return part if not part.is_floating_point() else part.detach().double().requires_grad_(part.requires_grad)
    return part.map_tensors(wide) if isinstance(part, TensorTree) else part


def cases():
    for backend in BACKENDS:
        covered = {"activations": ACTIVATIONS, "mixings": (*MIXINGS, "talking")} | COVERAGE.get(backend, {})
        for activation in covered["activations"]:
            for mixing in covered["mixings"]:
                yield backend, activation, mixing


def cases_of_blocks():
    """The reference computes no blocks, and `auto` hands over to the others."""
    return [case for case in cases() if case[0] in ("sdpa", "blocked") or case == ("auto", "softmax", "static")]


def cases_with_dropout():
    return [case for case in cases() if case[0] != "sdpa" or case[2] in ("none", "diagonal")]


def problem(activation, mixing, device, length, dim=4, heads=2, batch=2):
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device).requires_grad_()

    built = {name: normal(batch, heads, length, dim) for name in ("q", "k", "v")} | {"activation": activation}
    scores = (batch, heads, length, length)
    built["score_mixing"] = mixing_of("static", normal, scores) if mixing == "talking" else None
    built["prob_mixing"] = mixing_of("static" if mixing == "talking" else mixing, normal, scores)
    return built | {"mask": AttentionMask()}


@pytest.mark.parametrize(("backend", "activation", "mixing"), cases_of_blocks())
def test_long_sequences_and_windows_cross_the_borders_of_blocks(backend, activation, mixing, device):
    length = 150
    long = problem(activation, mixing, device, length)
    key_padding = torch.zeros(2, length, dtype=torch.bool, device=device)
    key_padding[0, -70:], key_padding[1, :70] = True, True
    places = torch.arange(length, device=device)
    documents = torch.stack([places // 40, places % 100 // 70])  # the second has parts
    for mask in (
        AttentionMask(),
        AttentionMask(True),
        AttentionMask(True, key_padding),
        AttentionMask(False, key_padding),
        AttentionMask(True, window=1),
        AttentionMask(True, key_padding, window=30),
        AttentionMask(True, query_repeats=2, window=65),
        AttentionMask(True, key_padding, num_appended_keys=2, window=70),
        AttentionMask(True, window=149),
        AttentionMask(True, key_padding, documents=documents),
        AttentionMask(False, documents=documents[:1]),
        AttentionMask(True, query_repeats=2, documents=documents, window=65),
        AttentionMask(False, query_repeats=2, num_appended_keys=2, documents=documents[:, 2:]),
    ):
        long["mask"] = mask
        assert_same(values_and_gradients(long, backend), values_and_gradients(long, "reference"), 1e-9)


@pytest.mark.parametrize(("backend", "activation", "mixing"), cases_of_blocks())
def test_blocks_that_grow_with_the_length_give_the_same(backend, activation, mixing, device):
    long = problem(activation, mixing, device, 1100) | {"mask": AttentionMask(True)}
    assert_same(values_and_gradients(long, backend), values_and_gradients(long, "reference"), 1e-9)


@pytest.mark.parametrize(("backend", "activation", "mixing"), cases())
def test_queries_without_keys_give_zeros_and_no_gradient(backend, activation, mixing, device):
    small = problem(activation, mixing, device, 3)
    key_padding = torch.tensor([[True, True, True], [True, False, False]], device=device)
    small["mask"] = AttentionMask(True, key_padding)  # sentence 0 sees nothing; query 0 of sentence 1 neither
    found = values_and_gradients(small, backend)
    assert_same(found, values_and_gradients(small, "reference"), 1e-9)
    assert found["heads"][0].abs().max() == 0 and found["heads"][1, :, 0].abs().max() == 0
    assert found["heads"][1, :, 1:].abs().min() > 0
    for name in ("q", "k", "v"):
        assert found[name][0].abs().max() == 0, name
    assert found["q"][1, :, 0].abs().max() == 0


@pytest.mark.parametrize(("backend", "activation", "mixing"), cases_with_dropout())
def test_dropout_zeroes_weights_at_its_rate_and_scales_the_rest(backend, activation, mixing, device):
    length, rate = 64, 0.25
    long = problem(activation, mixing, device, length) | {"mask": AttentionMask(True)}
    # with the unit matrix as values the output is the dropped weights
    long["v"] = torch.eye(length, dtype=torch.float64, device=device).expand(2, 2, length, length)
    weights = attend(**long)[0]
    torch.manual_seed(0)
    dropped = attend(**long, dropout_p=rate, backend=backend)[0]
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], weights[kept] / (1 - rate))
    for head in range(2):
        visible = weights[:, head] != 0
        share = kept[:, head][visible].double().mean().item()
        assert visible.sum() >= 4000  # the standard error of the share is below 0.007
        assert share == pytest.approx(1 - rate, abs=0.03)
    torch.manual_seed(0)
    assert torch.equal(attend(**long, dropout_p=rate, backend=backend)[0], dropped)


@pytest.mark.parametrize(("backend", "activation", "mixing"), cases_with_dropout())
def test_gradients_under_dropout_use_the_mask_of_the_forward_pass(backend, activation, mixing, device):
    small = problem(activation, mixing, device, 3, dim=2, batch=1) | {"mask": AttentionMask(True)}
    parts = leaves(small)

    def heads(*tensors):
        torch.manual_seed(4)
        given = dict(zip(parts, tensors, strict=True))
        arguments = {name: given.get(name, part) for name, part in small.items()}
        for name in ("score_mixing", "prob_mixing"):
            if name in given:
                arguments[name] = type(small[name])(given[name])
        return attend(**arguments, dropout_p=0.4, backend=backend)[0]

    assert torch.autograd.gradcheck(heads, list(parts.values()), nondet_tol=0.0)


def test_auto_leaves_plain_softmax_attention_to_sdpa_and_tells_it_of_causality(device, monkeypatch):
    calls = []

    def spy(q, k, v, **options):
        calls.append(options)
        return sdpa(q, k, v, **options)

    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    plain = problem("softmax", "none", device, 5)
    attend(**plain)
    attend(**plain | {"mask": AttentionMask(True)})
    attend(**plain | {"mask": AttentionMask(True), "q": plain["q"][:, :, -1:]})
    attend(**plain | {"mask": AttentionMask(True), "q": plain["q"][:, :, -2:]})
    assert [call["is_causal"] for call in calls] == [False, True, False, False]
    # one query sees every key: no mask; two queries of five keys: SDPA would align its causal mask to the first key
    assert [call["attn_mask"] is None for call in calls] == [True, True, True, False]


def test_sdpa_says_what_it_cannot_compute(device):
    mixed, mixing = problem("softmax", "static", device, 3), StaticMixing(torch.eye(2, device=device))
    for options, reason in [
        ({"activation": "sigsoftmax"}, "the activation sigsoftmax"),
        ({"need_weights": True}, r"the attention weights \(need_weights\)"),
        ({"score_mixing": mixing}, "head mixing of scores, before the softmax"),
        ({"dropout_p": 0.1}, "dropout after head mixing"),
    ]:
        with pytest.raises(ValueError, match=f"^backend='sdpa' cannot compute {reason}; use backend='auto' or 'ref"):
            attend(**mixed | options, backend="sdpa")
    attend(**mixed | {"prob_mixing": None, "dropout_p": 0.1}, backend="sdpa")
    with pytest.raises(ValueError, match="backend='flash': expected one of auto, reference, sdpa"):
        attend(**mixed, backend="flash")
