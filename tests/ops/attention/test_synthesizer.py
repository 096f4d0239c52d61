"""Scores of the random synthesizer, computed by every backend that can and differentiated."""

import brute_force
import pytest
import torch
from attention_problems import LargestTensor, mixing_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_lowrank.ops import AttentionCall, AttentionMask, RandomSynthesizer, StaticMixing, attention
from fairseq_lowrank.ops.attention import blocked
from fairseq_lowrank.ops.penalties import head_overlap


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@st.composite
def calls(draw):
    """A call, and the tensors of it that have gradients."""
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    keys = draw(st.integers(1, 5))
    queries = draw(st.integers(1, keys))
    shape = (batch, heads, queries, keys)
    # one matrix for all sentences, or one each where they count positions differently
    weight = normal(*shape[draw(st.sampled_from((0, 1))) :])
    v = normal(batch, draw(st.sampled_from((1, heads))), keys, 2, seed=1)
    padding = torch.arange(keys)[None] < torch.tensor([entry % keys for entry in range(batch)])[:, None]
    kinds = ("none", "static", "positionwise", "diagonal")
    rules = {
        name: mixing_of(draw(st.sampled_from(kinds)), lambda *size, seed=seed: normal(*size, seed=seed), shape)
        for seed, name in enumerate(("score_mixing", "prob_mixing"), start=2)
    }
    call = AttentionCall(
        RandomSynthesizer(weight, batch),
        v,
        AttentionMask(draw(st.booleans()), padding if draw(st.booleans()) else None),
        activation=draw(st.sampled_from(("softmax", "sigsoftmax"))),
        **rules,
    )
    return call, [weight, v, *(rule.weight for rule in rules.values() if rule is not None)]


def brute(call):
    """Dot products of the rows of R with unit vectors are R."""
    batch, heads, queries, keys = call.scores.shape
    unit = torch.eye(keys, dtype=torch.float64).expand(batch, heads, keys, keys)
    hidden = call.mask.hidden(call.scores.shape, "cpu")
    return brute_force.attend(
        call.scores.weight.detach().expand(batch, heads, queries, keys),
        unit,
        call.v.detach().repeat_interleave(heads // call.v.size(1), dim=1),
        1.0,
        call.activation,
        hidden=None if hidden is None else hidden.expand(batch, heads, queries, keys),
        mixing=None if call.prob_mixing is None else call.prob_mixing.weight.detach(),
        before=None if call.score_mixing is None else call.score_mixing.weight.detach(),
    )[0]


@settings(max_examples=40)
@given(drawn=calls())
def test_the_reference_is_the_brute_force(drawn):
    call, _ = drawn
    torch.testing.assert_close(attention(call, "reference")[0].detach(), brute(call), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", ["blocked", "auto"])
@settings(max_examples=60)
@given(drawn=calls())
def test_values_and_gradients_are_the_references(backend, drawn):
    call, tensors = drawn
    results = []
    for name in ("reference", backend):
        heads, _ = attention(call, name)
        gradients = torch.autograd.grad(heads.pow(2).sum(), tensors, materialize_grads=True, allow_unused=True)
        results.append([heads, *gradients])
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
@pytest.mark.parametrize("shape", [(2, 4, 4), (2, 2, 4, 4)], ids=["shared", "by-entry"])
def test_gradients_are_slopes(backend, shape, monkeypatch):
    monkeypatch.setattr(blocked, "_max_block_elements", lambda *_: 1)  # a block for each entry of the batch

    def heads(weight, v, mixing):
        call = AttentionCall(RandomSynthesizer(weight, 2), v, AttentionMask(True), prob_mixing=StaticMixing(mixing))
        return attention(call, backend)[0]

    assert torch.autograd.gradcheck(heads, (normal(*shape), normal(2, 2, 4, 3, seed=1), normal(2, 2, seed=2)))


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 4, 5)], ids=["shared", "by-entry"])
def test_its_heads_are_penalised(shape):
    def overlap(weight, before):
        call = AttentionCall(
            RandomSynthesizer(weight, 2), normal(2, 1, 5, 2), AttentionMask(), score_mixing=StaticMixing(before)
        )
        return head_overlap(call, ("row", "column"))

    assert torch.autograd.gradcheck(overlap, (normal(*shape), normal(3, 3, seed=1)))


def test_nothing_is_made_of_all_scores_of_a_batch():
    length, heads, batch = 1024, 2, 8
    weight = torch.randn(heads, length, length, requires_grad=True)
    v = torch.randn(batch, heads, length, 4, requires_grad=True)
    call = AttentionCall(RandomSynthesizer(weight, batch), v, AttentionMask(True), activation="sigsoftmax")
    with LargestTensor() as largest:
        attention(call, "blocked")[0].sum().backward()
    # the gradient of R itself is the largest; that of all scores would be 8 times as much
    assert largest.bytes == weight.untyped_storage().nbytes()
    assert weight.numel() > blocked.MAX_BLOCK_ELEMENTS


def test_half_precision_stays_near_float32():
    weight, v = torch.randn(2, 150, 150), torch.randn(2, 2, 150, 4)
    call = AttentionCall(RandomSynthesizer(weight, 2), v, AttentionMask(True))
    narrow = call.map_tensors(lambda tensor: tensor.bfloat16())
    for backend in ("reference", "blocked"):
        heads, _ = attention(narrow, backend)
        assert heads.dtype == torch.bfloat16
        torch.testing.assert_close(heads.float(), attention(call, backend)[0], rtol=0.05, atol=0.05)


def test_it_says_what_does_not_fit():
    v = torch.zeros(2, 3, 4, 1)
    with pytest.raises(ValueError, match=r"weight of shape \[3, 3, 4, 4\]: expected \[H, T, S\] or \[2, H, T, S\]"):
        attention(AttentionCall(RandomSynthesizer(torch.zeros(3, 3, 4, 4), 2), v, AttentionMask()))
    with pytest.raises(ValueError, match=r"weight of torch\.int64: expected a float tensor"):
        attention(AttentionCall(RandomSynthesizer(torch.zeros(3, 4, 4).long(), 2), v, AttentionMask()))
    with pytest.raises(ValueError, match="backend='sdpa' cannot compute scores other than dot products"):
        attention(AttentionCall(RandomSynthesizer(torch.zeros(3, 4, 4), 2), v, AttentionMask()), "sdpa")
