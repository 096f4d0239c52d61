"""A kind of scores that no file of the package names is computed by every backend that can, and differentiated."""

import json
import weakref
from dataclasses import dataclass

import pytest
import torch

from fairseq_lowrank.ops import AttentionCall, AttentionMask, DotProduct, PositionwiseMixing, StaticMixing, attention
from fairseq_lowrank.ops.attention import blocked, recomputing
from fairseq_lowrank.ops.attention.blocks import slice_block
from fairseq_lowrank.ops.attention.mask import select_head
from fairseq_lowrank.ops.attention.recomputing import RecomputeBackend
from fairseq_lowrank.ops.attention.tree import TensorTree, decode, encode, flatten, unflatten
from fairseq_lowrank.ops.penalties import head_overlap


@dataclass(frozen=True)
class Distances(TensorTree):
    """a_h · (t − s): scores of positions alone."""

    slopes: torch.Tensor  # [H]
    batch: int
    queries: int
    keys: int

    @property
    def shape(self):
        return self.batch, self.slopes.numel(), self.queries, self.keys

    def check(self):
        assert self.slopes.dim() == 1

    def dense(self):
        return (self.slopes[:, None, None] * self.distances()).expand(self.shape)

    def distances(self):
        return torch.arange(self.queries)[:, None] - torch.arange(self.keys).to(self.slopes)

    def select_head(self, batch, head, column=None):
        slopes = (
            select_head(self.slopes[:, None, None], batch, head)
            if column is None
            else (self.slopes[:, None, None] * column).sum()
        )
        return Distances(slopes.reshape(1), len(range(self.batch)[batch]), self.queries, self.keys)

    def blocks(self, work):
        return DistanceBlocks(self)


class DistanceBlocks:
    def __init__(self, scores):
        self.scores, self.gradient = scores, torch.zeros_like(scores.slopes)

    def forward(self, block, out):
        out.copy_(slice_block(self.scores.distances(), block) * self.scores.slopes[:, None, None])

    def backward(self, block, grad):
        self.gradient += (grad * slice_block(self.scores.distances(), block)).sum(dim=(0, 2, 3))

    def gradients(self):
        return [self.gradient]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("activation", ["softmax", "sigsoftmax"])
def test_scores_from_outside_compute_and_differentiate(activation):
    slopes, v, weight = normal(4), normal(2, 2, 150, 3, seed=1), normal(4, 4, seed=2)
    mask = AttentionMask(True, torch.arange(150)[None].repeat(2, 1) > 140)
    call = AttentionCall(
        Distances(slopes, 2, 150, 150),
        v,
        mask,
        score_mixing=StaticMixing(weight),
        prob_mixing=StaticMixing(weight),
        activation=activation,
    )
    results = []
    for backend in ("reference", "blocked", "auto"):
        heads, _ = attention(call, backend)
        results.append((heads, *torch.autograd.grad(heads.pow(2).sum(), [slopes, v, weight])))
    for other in results[1:]:
        for one, exact in zip(other, results[0], strict=True):
            torch.testing.assert_close(one, exact)
    with pytest.raises(ValueError, match="backend='sdpa' cannot compute scores other than dot products"):
        attention(call, "sdpa")


@dataclass(frozen=True)
class Table(TensorTree):
    """A row of numbers a head, and which of them each query and key have."""

    weight: torch.Tensor  # [H, N]
    index: torch.Tensor  # [T, S]

    @property
    def shape(self):
        return 1, len(self.weight), *self.index.shape

    def check(self):
        assert not self.index.is_floating_point()

    def dense(self):
        return self.weight[:, self.index][None]

    def blocks(self, work):
        return TableBlocks(self)


class TableBlocks:
    def __init__(self, scores):
        self.scores = scores

    def forward(self, block, out):
        out.copy_(self.scores.weight[:, self.scores.index[block.rows, block.keys]][None])


def test_numbers_by_which_scores_from_outside_look_up_stay_whole_under_autocast():
    weight, v = normal(2, 300).detach().float(), normal(1, 2, 300, 3, seed=1).detach().float()
    call = AttentionCall(Table(weight, torch.arange(300).flip(0).repeat(5, 1)), v, AttentionMask())
    with torch.autocast("cpu", torch.bfloat16):
        blocked, reference = (attention(call, backend)[0].float() for backend in ("blocked", "reference"))
    torch.testing.assert_close(blocked, reference, atol=0.02, rtol=0.02)


def test_float64_stays_float64_under_autocast_as_autocast_has_it():
    q, k, v = (normal(2, 2, 150, 3, seed=seed) for seed in range(3))
    call = AttentionCall(DotProduct(q, k), v, AttentionMask(True))
    expected = attention(call, "reference")[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(call, "blocked")[0]
    torch.testing.assert_close(found, expected)


def test_scores_from_outside_are_penalised():
    slopes = normal(3)
    weight = normal(3, 3, seed=1)

    def overlap(slopes, weight):
        scores = Distances(slopes, 2, 4, 5)
        return head_overlap(
            AttentionCall(scores, normal(2, 1, 5, 2), AttentionMask(), score_mixing=StaticMixing(weight)),
            ("row", "column"),
        )

    assert torch.autograd.gradcheck(overlap, (slopes, weight))


def test_a_call_is_taken_apart_and_put_together():
    call = AttentionCall(
        DotProduct(normal(1, 2, 3, 4), normal(1, 1, 5, 4), 0.3),
        normal(1, 2, 5, 1),
        AttentionMask(True, None, normal(3, 5), num_appended_keys=1),
        prob_mixing=PositionwiseMixing(normal(1, 3, 2, 2)),
        dropout_p=0.5,
    )
    structure, tensors, numbers = flatten(call)
    again = unflatten(structure, tensors, numbers)
    assert (structure, numbers) == flatten(again)[::2] and decode(encode(structure)) == structure
    assert all(one is other for one, other in zip(tensors, flatten(again)[1], strict=True))
    assert (
        again.scores.scale == 0.3
        and again.mask.num_appended_keys == 1
        and again.dropout_p == 0.5
        and again.score_mixing is None
    )


@pytest.mark.parametrize("backend", ["auto", "reference", "blocked"])
def test_a_running_call_is_not_serialised(backend, monkeypatch):
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("a call was parsed"))
    monkeypatch.setattr(json, "dumps", lambda value: pytest.fail("a call was serialised"))
    q, k, v, weight = normal(1, 2, 70, 4), normal(1, 2, 70, 4), normal(1, 2, 70, 3), normal(2, 2)
    call = AttentionCall(DotProduct(q, k), v, AttentionMask(True), prob_mixing=StaticMixing(weight))
    attention(call, backend)[0].sum().backward()
    assert all(tensor.grad is not None for tensor in (q, k, v, weight))


def test_eager_forward_computes_the_call_itself_and_keeps_only_its_tensors():
    q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    call = AttentionCall(DotProduct(q, k), v, AttentionMask(True), prob_mixing=StaticMixing(torch.eye(2)))
    seen = []

    def forward(given, seed):
        seen.append(given is call)
        return blocked.attend(given, seed)

    def backward(given, *arguments):
        seen.append(type(given) is AttentionCall and given.mask == AttentionMask(True))
        return blocked.input_gradients(given, *arguments)

    heads = recomputing.compute(call, RecomputeBackend("blocked", forward, backward))
    assert seen == [True]
    kept = weakref.ref(call)
    del call
    assert kept() is None
    call = AttentionCall(DotProduct(q, k), v, AttentionMask(True), prob_mixing=StaticMixing(torch.eye(2)))
    expected = torch.autograd.grad(attention(call, "reference")[0].sum(), (q, k, v))
    for gradient, wanted in zip(torch.autograd.grad(heads.sum(), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(gradient, wanted)
    assert seen == [True, True]
