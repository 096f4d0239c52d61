"""The reference computes the papers' formulas."""

import brute_force
import pytest
import torch
from attention_problems import attend, bias_of_distances, call_of, hidden, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_lowrank.ops import AttentionMask, PositionwiseMixing, StaticMixing
from fairseq_lowrank.ops.attention.reference import masked_scores


@settings(max_examples=60)
@given(data=st.data())
def test_reference_is_the_brute_force(data, device):
    problem = data.draw(problems(device, largest=4))
    heads, weights = attend(**problem, backend="reference", need_weights=True)
    cpu = {name: part.detach().cpu() if torch.is_tensor(part) else part for name, part in problem.items()}
    number_of_heads = cpu["q"].size(1)
    bias = bias_of_distances(problem)
    for part in (cpu["score_bias"], cpu["mask"].additive):
        if part is not None and part.dtype != torch.bool:
            bias = bias + part.detach().cpu()
    mixing, before = (None if cpu[n] is None else cpu[n].weight.detach().cpu() for n in ("prob_mixing", "score_mixing"))
    expected, expected_weights, expected_scores = brute_force.attend(
        cpu["q"],
        *(cpu[name].repeat_interleave(number_of_heads // cpu[name].size(1), dim=1) for name in "kv"),
        cpu["q"].size(-1) ** -0.5 if cpu["scale"] is None else cpu["scale"],
        cpu["activation"],
        score_bias=bias,
        hidden=hidden(problem),
        mixing=mixing,
        before=before,
        sinks=cpu["sinks"],
    )
    torch.testing.assert_close(weights.cpu(), expected_weights, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(heads.cpu(), expected, rtol=1e-10, atol=1e-12)
    scores = masked_scores(call_of(**problem)).cpu()
    torch.testing.assert_close(scores, expected_scores, rtol=1e-10, atol=1e-12)


def test_positionwise_mixing_is_made_of_the_queries(device):
    generator = torch.Generator().manual_seed(0)
    query, query_weight, base = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
        for shape in ((2, 3, 4, 5), (5, 3), (3, 3))
    )
    mixing = PositionwiseMixing.of_queries(query, query_weight, base)
    expected = brute_force.mixing_matrix(query.cpu(), query_weight.cpu(), base.cpu())
    torch.testing.assert_close(mixing.weight.cpu(), expected)


def test_weights_are_float32_and_heads_keep_their_dtype_in_half_precision(device):
    q, k, v = torch.randn(3, 1, 2, 300, 8, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    mixing = StaticMixing(torch.eye(2, device=device, dtype=torch.bfloat16))
    heads, weights = attend(q, k, v, prob_mixing=mixing, need_weights=True, backend="reference")
    assert heads.dtype == torch.bfloat16 and weights.dtype == torch.float32
    # normalised in bfloat16 the sum of 300 weights would be off by about 1e-3
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 300, device=device), rtol=0, atol=1e-5)


def test_scores_and_weights_are_mixed_in_float32_under_autocast(device):
    q, k, v = (torch.randn(2, 4, 5, 8, device=device) for _ in range(3))
    mixing = StaticMixing(torch.eye(4, device=device) + 0.1)
    problem = {"q": q, "k": k, "v": v, "score_mixing": mixing, "prob_mixing": mixing}
    expected = attend(**problem, need_weights=True, backend="reference")[1]
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        scores = masked_scores(call_of(**problem))
        weights = attend(**problem, need_weights=True, backend="reference")[1]
    assert scores.dtype == weights.dtype == torch.float32
    torch.testing.assert_close(weights, expected, atol=5e-3, rtol=0)


def test_weights_are_those_before_dropout(device):
    q = torch.randn(1, 2, 4, 3, generator=torch.Generator().manual_seed(0)).to(device)
    exact = attend(q, q, q, need_weights=True)[1]
    heads, weights = attend(q, q, q, dropout_p=0.5, need_weights=True)
    assert torch.equal(weights, exact)
    assert not torch.allclose(heads, exact @ q)


def test_a_causal_mask_is_aligned_to_the_last_query(device):
    q, k = torch.zeros(1, 1, 2, 1, device=device), torch.zeros(1, 1, 4, 1, device=device)
    weights = attend(q, k, k, mask=AttentionMask(causal=True), need_weights=True)[1]
    assert weights[0, 0, :, -1].tolist() == [0, 0.25]
    assert weights[0, 0, 0].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
