"""Relative scores: their formula, the backends, and memory."""

import pytest
import torch
from attention_problems import LargestTensor, mixing_of, problems
from hypothesis import given
from hypothesis import strategies as st

from fairseq_lowrank.ops import AttentionCall, AttentionMask, DotProduct, Relative, StaticMixing, attention
from fairseq_lowrank.ops.attention import blocked
from fairseq_lowrank.ops.penalties import head_overlap


@st.composite
def calls(draw, device, dtype=torch.float64, largest=5):
    """A call of relative scores, and its tensors that require gradients: any shapes, masks, biases, mixing, distances."""
    problem = draw(problems(device, dtype=dtype, largest=largest))
    q, k, scale = (problem.pop(name) for name in ("q", "k", "scale"))
    batch, heads, queries, _ = q.shape
    groups = draw(st.sampled_from([groups for groups in range(1, heads + 1) if heads % groups == 0]))
    keys, dim = k.size(2), draw(st.integers(1, 4))
    count = draw(st.integers(keys, keys + queries - 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    p, positions = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for shape in ((batch, heads, queries, dim), (1, groups, count, dim))
    )
    call = AttentionCall(Relative(DotProduct(q, k, scale), p, positions), **problem)
    tensors = {"q": q, "k": k, "p": p, "positions": positions, "v": problem["v"]}
    tensors |= {name: problem[name].weight for name in ("score_mixing", "prob_mixing") if problem[name] is not None}
    return call, tensors


def in_loops(scores):
    """The formula, number by number."""
    q, k, p, r = (tensor.tolist() for tensor in (scores.content.q, scores.content.k, scores.p, scores.positions))
    batch, heads, queries, keys = scores.shape
    result = torch.zeros(scores.shape, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for t in range(queries):
                for s in range(keys):
                    content = zip(q[b][h][t], k[b][h * len(k[b]) // heads][s], strict=True)
                    total = sum(x * y for x, y in content)
                    distance = t + keys - queries - s
                    row = keys - 1 - distance
                    if row < len(r[0][0]):
                        total += sum(x * y for x, y in zip(p[b][h][t], r[0][h * len(r[0]) // heads][row], strict=True))
                    result[b, h, t, s] = total * scores.content.factor
    return result


@given(data=st.data())
def test_full_is_the_formula(data):
    call, _ = data.draw(calls("cpu", largest=4))
    call.scores.check()
    torch.testing.assert_close(call.scores.dense(), in_loops(call.scores))


def values_and_gradients(call, tensors, backend):
    heads, _ = attention(call, backend)
    cotangent = torch.randn(heads.shape, generator=torch.Generator().manual_seed(0)).to(heads)
    gradients = torch.autograd.grad(heads, list(tensors.values()), cotangent, allow_unused=True, materialize_grads=True)
    return [heads, *gradients]


@given(data=st.data())
def test_blocks_give_the_references_values_and_gradients(data, device):
    call, tensors = data.draw(calls(device))
    expected = values_and_gradients(call, tensors, "reference")
    for one, other in zip(values_and_gradients(call, tensors, "blocked"), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def long_call(queries, keys, device="cpu", dtype=torch.float64, batch=2, heads=4, groups=2, dim=3, **parts):
    generator = torch.Generator().manual_seed(queries)

    def normal(*shape):
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(device, dtype).requires_grad_()

    causal = parts.setdefault("mask", AttentionMask(True)).causal
    positions = normal(1, groups, keys if causal else keys + queries - 1, dim)
    tensors = {
        "q": normal(batch, heads, queries, dim),
        "k": normal(batch, groups, keys, dim),
        "p": normal(batch, heads, queries, dim),
        "positions": positions,
        "v": normal(batch, groups, keys, dim),
    }
    for name in ("score_mixing", "prob_mixing"):
        if name in parts:
            parts[name] = mixing_of(parts[name], normal, (batch, heads, queries, keys))
            tensors[name] = parts[name].weight
    scores = Relative(DotProduct(tensors["q"], tensors["k"]), tensors["p"], positions)
    return AttentionCall(scores, tensors["v"], **{"mask": AttentionMask(), **parts}), tensors


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"prob_mixing": "positionwise"},
        {"prob_mixing": "static", "score_mixing": "static", "activation": "sigsoftmax"},
        {"mask": AttentionMask()},
        {"mask": AttentionMask(True, window=40)},
    ],
    ids=["causal", "positionwise", "talking", "all distances", "window"],
)
@pytest.mark.parametrize(("queries", "keys"), [(150, 300), (300, 300), (200, 70)])
def test_long_sequences_and_memories_cross_the_borders_of_blocks(parts, queries, keys, device):
    call, tensors = long_call(queries, keys, device, **parts)
    expected = values_and_gradients(call, tensors, "reference")
    for one, other in zip(values_and_gradients(call, tensors, "blocked"), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_stay_near_float64(dtype, device):
    call, tensors = long_call(80, 130, device, dtype, prob_mixing="static")
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    scores = Relative(DotProduct(wide["q"], wide["k"]), wide["p"], wide["positions"])
    exact = AttentionCall(scores, wide["v"], call.mask, prob_mixing=StaticMixing(wide["prob_mixing"]))
    heads = attention(exact, "reference")[0]
    expected = torch.autograd.grad(heads.sum(), list(wide.values()))
    for backend in ("reference", "blocked"):
        found = attention(call, backend)[0]
        assert found.dtype == dtype
        gradients = torch.autograd.grad(found.float().sum(), list(tensors.values()))
        for one, other in zip((found, *gradients), (heads, *expected), strict=True):
            scale = max(1.0, other.abs().max().item())
            tolerance = 1e-4 if dtype == torch.float32 else 6e-2
            torch.testing.assert_close(one.double() / scale, other / scale, rtol=0, atol=tolerance)


def test_no_tensor_grows_with_the_square_of_the_length():
    length = 2048
    call, tensors = long_call(length, length, dtype=torch.float32, batch=1, heads=2, groups=2, prob_mixing="static")
    with LargestTensor() as largest:
        values_and_gradients(call, tensors, "blocked")
    # float32 scores of one block of queries, and of the distances between it and its keys
    assert largest.bytes <= 4 * 2 * blocked.MAX_BLOCK_ROWS * (length + blocked.MAX_BLOCK_ROWS)
    assert largest.bytes < length * length


def test_sdpa_refuses_them():
    call, _ = long_call(3, 3)
    with pytest.raises(ValueError, match="backend='sdpa' cannot compute scores other than dot products"):
        attention(call, "sdpa")


@given(data=st.data())
def test_penalties_read_one_head_at_a_time(data):
    call, _ = data.draw(calls("cpu"))
    _, weights = attention(call.replace(prob_mixing=None, need_weights=True), "reference")
    expected = torch.zeros(len(weights), dtype=torch.float64)
    for i in range(weights.size(1)):
        for j in range(i):
            expected += (weights[:, i] @ weights[:, j].transpose(1, 2)).square().sum(dim=(1, 2))
    torch.testing.assert_close(head_overlap(call, ("row",))[0], expected)


@pytest.mark.parametrize(
    ("p", "positions", "message"),
    [
        ((2, 4, 3, 5), (1, 2, 6, 4), r"positions of shape \[1, 2, 6, 4\]: expected \[1, G, N, 5\], G dividing 4"),
        ((2, 4, 3, 5), (1, 3, 6, 5), r"positions of shape \[1, 3, 6, 5\]"),
        ((2, 4, 3, 5), (2, 2, 6, 5), r"positions of shape \[2, 2, 6, 5\]"),
        ((2, 4, 2, 5), (1, 2, 6, 5), r"p of shape \[2, 4, 2, 5\] and torch.float32: expected floats \[2, 4, 3, D\]"),
        ((2, 4, 3, 5), (1, 2, 5, 5), "positions of 5 distances: expected 6 to 8 for 3 queries and 6 keys"),
        ((2, 4, 3, 5), (1, 2, 9, 5), "positions of 9 distances: expected 6 to 8 for 3 queries and 6 keys"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(p, positions, message):
    content = DotProduct(torch.zeros(2, 4, 3, 5), torch.zeros(2, 4, 6, 5))
    call = AttentionCall(
        Relative(content, torch.zeros(p), torch.zeros(positions)), torch.zeros(2, 4, 6, 5), AttentionMask()
    )
    with pytest.raises(ValueError, match=message):
        attention(call)
