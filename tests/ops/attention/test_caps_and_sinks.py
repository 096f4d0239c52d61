"""Capped scores and sinks: the reference has their formulas, and backends that cannot compute them refuse them."""

import dataclasses

import pytest
import torch

from fairseq_lowrank.ops import AttentionCall, AttentionMask, DotProduct, StaticMixing, attention
from fairseq_lowrank.ops.attention import check_backend


def problem(**choices):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 4, 3, generator=generator).double() for heads in (4, 2, 2))
    mixing = StaticMixing(torch.randn(4, 4, generator=generator).double())
    sinks = torch.randn(4, generator=generator).double()
    call = AttentionCall(DotProduct(q, k, 0.7), v, AttentionMask(True), score_mixing=mixing, need_weights=True)
    values = {"score_cap": 0.5, "sinks": sinks, "prob_mixing": mixing}
    return dataclasses.replace(call, **{name: values[name] for name, wanted in choices.items() if wanted})


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("cap", "sinks"), [(True, False), (False, True), (True, True)])
def test_the_reference_has_the_formulas(cap, sinks, mixed):
    call = problem(score_cap=cap, sinks=sinks, prob_mixing=mixed)
    heads, weights = attention(call)
    q, k = call.scores.q, call.scores.k
    for b in range(2):
        scores = [q[b, i] @ k[b, i // 2].T * 0.7 for i in range(4)]
        if cap:
            scores = [0.5 * torch.tanh(score / 0.5) for score in scores]
        scores = [sum(call.score_mixing.weight[j, i] * scores[j] for j in range(4)) for i in range(4)]
        patterns = []
        for i in range(4):
            rows = []
            for t in range(4):
                terms = scores[i][t, : t + 1].exp()
                total = terms.sum() + (call.sinks[i].exp() if sinks else 0.0)
                rows.append(torch.cat([terms / total, torch.zeros(3 - t).double()]))
            patterns.append(torch.stack(rows))
        if mixed:
            patterns = [sum(call.prob_mixing.weight[j, i] * patterns[j] for j in range(4)) for i in range(4)]
        for i in range(4):
            torch.testing.assert_close(weights[b, i], patterns[i])
            torch.testing.assert_close(heads[b, i], patterns[i] @ call.v[b, i // 2])


@pytest.mark.parametrize(
    ("backend", "choice", "said"),
    [
        *((backend, "score_cap", "capped scores") for backend in ("sdpa", "blocked", "triton", "tiled")),
        *((backend, "sinks", "sinks") for backend in ("sdpa", "triton", "tiled")),
    ],
)
def test_other_backends_refuse_them(backend, choice, said):
    call = dataclasses.replace(problem(**{choice: True}), need_weights=False)
    with pytest.raises(ValueError, match=f"cannot compute {said}"):
        check_backend(backend, call)
    assert attention(call)[0].isfinite().all()


def test_a_row_without_keys_gives_zeros_next_to_a_sink():
    call = dataclasses.replace(problem(sinks=True), mask=AttentionMask(key_padding=torch.ones(2, 4, dtype=torch.bool)))
    assert not attention(call)[0].any()


@pytest.mark.parametrize(
    ("changes", "said"), [({"score_cap": 0.0}, "score_cap=0.0"), ({"sinks": torch.zeros(3)}, "sinks of shape")]
)
def test_what_makes_no_sense_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        attention(dataclasses.replace(problem(), **changes))
