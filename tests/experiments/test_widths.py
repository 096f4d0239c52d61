"""The grid of widths: equal weights, a batched model that is its models one by one, its optimiser, and the exchange rate."""

import pytest
import torch

from experiments.evidence import widths
from experiments.evidence.widths import CORE, RATES, RATIOS, SEEDS, SIZES, Adam, Shape

TINY = Shape(width=16, heads=2, head_dim=8, ffn=24)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(widths, "CONTEXT", 8)
    monkeypatch.setattr(widths, "PIECES", 32)


@pytest.mark.parametrize("head_dim", SIZES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_rows_have_equal_weights_and_their_ratio(ratio, head_dim):
    found = widths.shape(ratio, head_dim)
    assert found.core == pytest.approx(CORE, rel=0.001)
    assert found.heads * head_dim == pytest.approx(ratio * found.width, rel=0.01)


def test_six_trainings_at_once_are_each_one_alone(small):
    w = widths.weights(TINY, "cpu")
    tokens = torch.randint(32, (6, 2, 9), generator=torch.Generator().manual_seed(1))
    found = widths.losses(w, tokens, TINY)
    alone = [
        widths.losses({name: one[run : run + 1] for name, one in w.items()}, tokens[run : run + 1], TINY)
        for run in range(6)
    ]
    torch.testing.assert_close(found, torch.cat(alone))
    assert torch.equal(w["output"][0], w["output"][len(SEEDS)]) and not torch.equal(w["output"][0], w["output"][1])


def test_the_optimiser_is_adam_with_a_rate_and_a_clip_for_each_training():
    start = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(1))
    ours = {"w": start.clone().requires_grad_()}
    optimizer = Adam(ours)
    theirs = [one.clone().requires_grad_() for one in start]
    rates = [rate for rate in RATES for _ in SEEDS]
    others = [torch.optim.Adam([one], lr=rate, betas=(0.9, 0.98)) for one, rate in zip(theirs, rates, strict=True)]
    for _ in range(4):
        (ours["w"] ** 3).sum().backward()
        optimizer.step(1.0)
        for one, other in zip(theirs, others, strict=True):
            other.zero_grad()
            (one**3).sum().backward()
            torch.nn.utils.clip_grad_norm_([one], 1.0)
            other.step()
    torch.testing.assert_close(ours["w"], torch.stack(theirs), rtol=1e-5, atol=1e-6)


def test_a_training_learns_and_a_lead_is_worth_weights(small):
    pattern = torch.arange(400, dtype=torch.int16) % 7
    data = {"train": pattern, "valid": pattern, "test": pattern}
    found = widths.train(TINY, data, "cpu", tokens=8 * 60)
    assert max(found["test"][1]) < 4.0  # of log2(32) = 5 bits

    def row(ratio, head_dim, bits):
        return {
            "ratio": ratio,
            "head_dim": head_dim,
            "width": 1,
            "valid": [[bits] * 3, [9.0] * 3],
            "test": [[bits] * 3, [0.0] * 3],
        }

    rows = [row(1.0, size, 5.0) for size in SIZES] + [row(2.0, size, 4.9) for size in SIZES] + [row(1.0, 32, 5.1)]
    shown = widths.table(rows)
    assert "| 32 | 2 | 1 | 4.9000 | 100% | 2.00 |" in shown and "worth 0.1000 bits" in shown
