"""The reference computes the papers' formulas."""

import brute_force
import pytest
import torch
from attention_problems import fixed, hidden, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_lowrank.ops import AttentionMask, HeadMixing, attention


@settings(fixed, max_examples=60)
@given(data=st.data())
def test_reference_is_the_brute_force(data, device):
    problem = data.draw(problems(device, largest=4))
    heads, weights = attention(**problem, backend="reference", need_weights=True)
    cpu = {name: part.detach().cpu() if torch.is_tensor(part) else part for name, part in problem.items()}
    number_of_heads = cpu["q"].size(1)
    bias = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    for part in (cpu["score_bias"], cpu["mask"].additive):
        if part is not None and part.dtype != torch.bool:
            bias = bias + part.detach().cpu()
    mixing = HeadMixing(*(part if part is None else part.detach().cpu() for part in cpu.get("mixing") or (None,)))
    expected, expected_weights = brute_force.attend(
        cpu["q"],
        cpu["k"].expand(-1, number_of_heads, -1, -1),
        cpu["v"].expand(-1, number_of_heads, -1, -1),
        cpu["q"].size(-1) ** -0.5 if cpu["scale"] is None else cpu["scale"],
        cpu["activation"],
        score_bias=bias,
        hidden=hidden(problem),
        mixing=mixing.weight,
        query_weight=mixing.query_weight,
        mixing_query=cpu.get("mixing_query"),
    )
    torch.testing.assert_close(weights.cpu(), expected_weights, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(heads.cpu(), expected, rtol=1e-10, atol=1e-12)


def test_weights_are_float32_and_heads_keep_their_dtype_in_half_precision(device):
    q, k, v = torch.randn(3, 1, 2, 300, 8, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    mixing = HeadMixing(torch.eye(2, device=device, dtype=torch.bfloat16))
    heads, weights = attention(q, k, v, mixing=mixing, need_weights=True, backend="reference")
    assert heads.dtype == torch.bfloat16 and weights.dtype == torch.float32
    # normalised in bfloat16 the sum of 300 weights would be off by about 1e-3
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 300, device=device), rtol=0, atol=1e-5)


def test_weights_are_those_before_dropout(device):
    q = torch.randn(1, 2, 4, 3, generator=torch.Generator().manual_seed(0)).to(device)
    exact = attention(q, q, q, need_weights=True)[1]
    heads, weights = attention(q, q, q, dropout_p=0.5, need_weights=True)
    assert torch.equal(weights, exact)
    assert not torch.allclose(heads, exact @ q)


def test_a_causal_mask_is_aligned_to_the_last_query(device):
    q, k = torch.zeros(1, 1, 2, 1, device=device), torch.zeros(1, 1, 4, 1, device=device)
    weights = attention(q, k, k, mask=AttentionMask(causal=True), need_weights=True)[1]
    assert weights[0, 0, :, -1].tolist() == [0, 0.25]
    assert weights[0, 0, 0].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
