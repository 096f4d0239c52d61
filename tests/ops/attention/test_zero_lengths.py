"""No query, no key or no batch entry: every kind of scores gives zeros of the right shape in every backend that computes it."""

import itertools

import pytest
import torch

from fairseq_lowrank.ops import (
    AttentionCall,
    AttentionMask,
    DotProduct,
    RandomSynthesizer,
    Relative,
    StaticMixing,
    attention,
)

HEADS, DIM = 2, 3
LENGTHS = [(batch, t, s) for batch, t, s in itertools.product((0, 2), (0, 1, 4), (0, 1, 4)) if not (batch and t and s)]


def leaf(*shape):
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def dot_product(batch, queries, keys, causal):
    return DotProduct(leaf(batch, HEADS, queries, DIM), leaf(batch, 1, keys, DIM))


def relative(batch, queries, keys, causal):
    count = keys if causal else max(keys + queries - 1, keys)
    return Relative(
        dot_product(batch, queries, keys, causal), leaf(batch, HEADS, queries, DIM), leaf(1, HEADS, count, DIM)
    )


def random_synthesizer(batch, queries, keys, causal):
    return RandomSynthesizer(leaf(HEADS, queries, keys), batch)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa", "blocked"])
@pytest.mark.parametrize("scores", [dot_product, relative, random_synthesizer], ids=lambda scores: scores.__name__)
def test_zero_lengths_give_zeros_and_finite_gradients(scores, backend, causal):
    for batch, queries, keys in LENGTHS:
        for mixing in (None, StaticMixing(leaf(HEADS, HEADS))):
            made, v = scores(batch, queries, keys, causal), leaf(batch, HEADS, keys, DIM)
            call = AttentionCall(made, v, AttentionMask(causal), prob_mixing=mixing)
            if backend == "sdpa" and scores is not dot_product:
                continue
            heads, _ = attention(call, backend)
            assert heads.shape == (batch, HEADS, queries, DIM) and not heads.any()
            heads.sum().backward()
            assert v.grad.shape == v.shape and not v.grad.any()
