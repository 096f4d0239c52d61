"""The penalties of the regularisers against loops over every pair of heads, and what they cost."""

import pytest
import torch
from attention_problems import bias_of_distances, call_of, hidden, problems
from brute_force import attend
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_lowrank.ops import AttentionMask, PositionwiseMixing, StaticMixing, penalties
from fairseq_lowrank.ops.penalties import head_overlap, mixing_orthogonality

SPACES = ("row", "column")


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def pairwise_overlap(weights):
    """R_d and R_c ``[2, B]`` of probabilities ``[B, H, T, S]``, the products written out for every pair of heads."""
    batch, heads = weights.shape[:2]
    values = torch.zeros(2, batch, dtype=torch.float64)
    for b in range(batch):
        for j in range(heads):
            for i in range(j):
                first, second = weights[b, i], weights[b, j]
                values[0, b] += torch.linalg.matrix_norm(first @ second.T) ** 2
                values[1, b] += torch.linalg.matrix_norm(first.T @ second) ** 2
    return values


@settings(max_examples=60)
@given(data=st.data())
def test_head_overlap_is_the_sum_over_pairs_of_heads(data, device):
    problem = data.draw(problems(device))
    batch, heads, queries, dim = problem["q"].shape
    padding = torch.rand(batch, queries, generator=torch.Generator().manual_seed(queries)) < 0.3
    mask, bias = problem["mask"], problem["score_bias"]
    if mask.bias is not None:
        bias = mask.bias if bias is None else bias + mask.bias
    shape = (batch, heads, queries, problem["k"].size(2))
    distances = bias_of_distances(problem)
    q, k = (problem[name].detach().cpu() for name in ("q", "k"))
    k = k.repeat_interleave(heads // k.size(1), dim=1)
    _, weights, _ = attend(
        q,
        k,
        k,
        dim**-0.5 if problem["scale"] is None else problem["scale"],
        problem["activation"],
        distances if bias is None else distances + bias.detach().cpu().expand(shape),
        hidden(problem),
        before=None if problem["score_mixing"] is None else problem["score_mixing"].weight.detach().cpu(),
        sinks=problem["sinks"],
    )
    expected = pairwise_overlap(weights.masked_fill(padding[:, None, :, None], 0.0))
    actual = head_overlap(call_of(**problem), SPACES, padding.to(device))
    torch.testing.assert_close(actual.detach().cpu(), expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=15)
@given(data=st.data())
def test_gradients_of_head_overlap_are_its_slopes(data, device):
    problem = data.draw(problems(device, largest=3))
    names = ("q", "k", "score_bias", "sinks", "distance_bias")
    leaves = {name: problem.pop(name) for name in names if problem[name] is not None}
    before = problem.pop("score_mixing")
    spaces = data.draw(st.sampled_from((SPACES, ("row",), ("column",))))

    def overlap(weight, *tensors):
        mixing = None if before is None else type(before)(weight)
        parts = dict(zip(leaves, tensors, strict=True))
        return head_overlap(call_of(**parts, **problem, score_mixing=mixing), spaces)

    weight = None if before is None else before.weight
    assert torch.autograd.gradcheck(overlap, (weight, *leaves.values()))


@pytest.mark.parametrize("spaces", [("row",), ("column",), SPACES])
def test_sequences_taken_in_blocks_give_the_same(spaces, monkeypatch, device):
    leaves = [normal(5, 3, 6, 4).to(device), normal(5, 1, 7, 4, seed=1).to(device), normal(3, 1, 7, seed=2).to(device)]
    mask = AttentionMask(
        key_padding=torch.arange(7, device=device) >= torch.tensor([[7], [5], [2], [7], [1]], device=device)
    )

    def overlap():
        q, k, bias = (leaf.clone().requires_grad_() for leaf in leaves)
        values = head_overlap(call_of(q, k, mask=mask, score_bias=bias), spaces)
        return values, *torch.autograd.grad(values.square().sum(), (q, k, bias))

    whole = overlap()
    monkeypatch.setattr(penalties, "BLOCK_NUMBERS", 2 * 49)
    for expected, actual in zip(whole, overlap(), strict=True):
        torch.testing.assert_close(actual, expected)


def test_padding_and_batch_mates_change_nothing(device):
    q, k = normal(1, 3, 4, 5).to(device).requires_grad_(), normal(1, 3, 6, 5, seed=1).to(device).requires_grad_()
    alone = head_overlap(call_of(q, k), SPACES)
    grads = torch.autograd.grad(alone.sum(), (q, k))
    other_q, other_k = (tensor.to(device) for tensor in (normal(2, 3, 7, 5, seed=2), normal(2, 3, 8, 5, seed=3)))
    other_q[1, :, :4], other_k[1, :, 2:] = q[0].detach(), k[0].detach()
    wide_q, wide_k = other_q.requires_grad_(), other_k.requires_grad_()
    query_padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3], device=device)
    key_padding = torch.tensor([[False] * 8, [True] * 2 + [False] * 6], device=device)
    padded = head_overlap(call_of(wide_q, wide_k, mask=AttentionMask(key_padding=key_padding)), SPACES, query_padding)
    torch.testing.assert_close(padded[:, 1:], alone)
    wide_grads = torch.autograd.grad(padded[:, 1].sum(), (wide_q, wide_k))
    torch.testing.assert_close(wide_grads[0][1, :, :4], grads[0][0])
    torch.testing.assert_close(wide_grads[1][1, :, 2:], grads[1][0])
    assert not wide_grads[0][0].any()
    assert not wide_grads[0][1, :, 4:].any()
    assert not wide_grads[1][1, :, :2].any()


def test_heads_that_look_at_different_keys_from_different_queries_do_not_overlap(device):
    def overlap(first, second):
        q = torch.tensor([first, second], dtype=torch.float64, device=device)[None] * 100
        keys = torch.eye(4, dtype=torch.float64, device=device)[None, None]
        return head_overlap(call_of(q, keys, scale=1.0), SPACES)[:, 0].tolist()

    def looking_at(*keys):
        return torch.eye(4)[list(keys)].tolist()

    assert overlap(looking_at(0, 1), looking_at(2, 3)) == pytest.approx([0.0, 2.0], abs=1e-6)
    assert overlap(looking_at(0, 1), looking_at(1, 0)) == pytest.approx([2.0, 2.0], abs=1e-6)
    assert overlap(looking_at(0, 0), looking_at(0, 0)) == pytest.approx([4.0, 4.0], abs=1e-6)


def test_one_head_overlaps_with_none(device):
    q = normal(2, 1, 3, 4).to(device).requires_grad_()
    values = head_overlap(call_of(q, q), SPACES)
    values.sum().backward()
    assert not values.any()
    assert not q.grad.any()


def test_an_unknown_space_is_refused():
    with pytest.raises(ValueError, match=r"spaces=\['null'\]: expected row, column"):
        head_overlap(call_of(normal(1, 1, 1, 1), normal(1, 1, 1, 1)), ("null",))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_summed_in_float32(dtype, autocast, device):
    def overlap(tensors):
        q, k, bias = (tensor.detach().requires_grad_() for tensor in tensors)
        values = head_overlap(call_of(q, k, score_bias=bias), SPACES)
        return values, *torch.autograd.grad(values.sum(), (q, k, bias))

    half = [
        tensor.to(device, dtype)
        for tensor in (normal(2, 8, 40, 4), normal(2, 8, 40, 4, seed=1), normal(40, 40, seed=2))
    ]
    with torch.autocast(device, dtype, enabled=autocast):
        actual = overlap(half)
    expected = overlap([tensor.float() for tensor in half])
    assert actual[0].dtype == torch.float32
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=0)
    for grad, right in zip(actual[1:], expected[1:], strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.float(), right, rtol=1e-2, atol=1e-2 * right.abs().max().item())


class LargestTensor(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_nothing_of_the_size_of_all_heads_matrices_is_ever_made(monkeypatch, device):
    monkeypatch.setattr(penalties, "BLOCK_NUMBERS", 1)
    batch, heads, length, dim = 3, 8, 48, 1
    q, k = (normal(batch, heads, length, dim, seed=seed).to(device).requires_grad_() for seed in (0, 1))
    saved = []
    with (
        LargestTensor() as forward,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        total = head_overlap(call_of(q, k, mask=AttentionMask(causal=True)), SPACES).sum()
    with LargestTensor() as backward:
        total.backward()
    assert max(forward.largest, backward.largest) == length**2
    assert {tensor.data_ptr() for tensor in saved} == {q.data_ptr(), k.data_ptr()}


def test_static_mixing_orthogonality_is_the_squared_distance_of_its_gram_matrix_from_the_identity(device):
    weight = normal(3, 3).to(device).requires_grad_()
    expected = 0.0
    for i in range(3):
        for j in range(3):
            entry = sum(weight[k, i].item() * weight[k, j].item() for k in range(3))
            expected += (entry - (i == j)) ** 2
    assert mixing_orthogonality(StaticMixing(weight)).tolist() == pytest.approx([expected])
    assert torch.autograd.gradcheck(lambda weight: mixing_orthogonality(StaticMixing(weight)), weight)


def test_positionwise_mixing_orthogonality_is_the_mean_over_positions_that_are_not_padding(device):
    weight, query_weight, query = normal(2, 2), normal(3, 2, seed=1), normal(2, 2, 4, 3, seed=2)
    padding = torch.tensor([[True, False, False, False], [False, False, True, True]])
    expected = []
    for b in range(2):
        errors = []
        for t in range(4):
            matrix = torch.stack([query[b, j, t] @ query_weight + weight[j] for j in range(2)])
            if not padding[b, t]:
                errors.append((torch.linalg.matrix_norm(matrix.T @ matrix - torch.eye(2)) ** 2).item())
        expected.append(sum(errors) / len(errors))
    leaves = [tensor.to(device).requires_grad_() for tensor in (weight, query_weight, query)]

    def orthogonality(weight, query_weight, query):
        return mixing_orthogonality(PositionwiseMixing.of_queries(query, query_weight, weight), padding.to(device))

    assert orthogonality(*leaves).tolist() == pytest.approx(expected)
    assert torch.autograd.gradcheck(orthogonality, leaves)


@pytest.mark.parametrize("mixing", [StaticMixing(torch.eye(4)), PositionwiseMixing(torch.eye(4).expand(2, 5, 4, 4))])
def test_mixing_that_starts_at_the_identity_is_orthogonal(mixing):
    assert not mixing_orthogonality(mixing).any()


def test_a_sequence_of_padding_alone_adds_nothing():
    mixing = PositionwiseMixing(normal(2, 2, 2, 2))
    values = mixing_orthogonality(mixing, torch.tensor([[True, True], [False, True]]))
    assert values[0] == 0
    assert values[1] > 0
