"""The self-check of kernels runs in the middle of a user's call, and leaves nothing in it."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fairseq_lowrank.ops import AttentionCall, AttentionMask, DotProduct
from fairseq_lowrank.ops.attention import selfcheck


@pytest.fixture
def call(monkeypatch):
    monkeypatch.setattr(selfcheck, "_results", {})
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    return AttentionCall(DotProduct(q, k), v, AttentionMask())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_check_within_activation_checkpointing_changes_nothing(use_reentrant, call, monkeypatch):
    modes = []

    def differentiate(call, backend):
        modes.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.is_inference(call.v)))
        q = call.dot_product.q.requires_grad_()
        torch.autograd.grad(q.exp().sin().sum(), q)
        return selfcheck.SelfCheckResult(None)

    def compute(x):
        assert selfcheck.checked(call).error is None
        return x.exp().sin()

    monkeypatch.setattr(selfcheck, "self_check", differentiate)
    x = torch.randn(3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        checkpoint(compute, x, use_reentrant=use_reentrant).sum().backward()
    torch.testing.assert_close(x.grad, x.exp().cos() * x.exp())
    assert modes == [(False, True, False)]


def test_a_lack_of_memory_says_nothing_about_the_kernels(call, monkeypatch):
    def fail(*args, **options):
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(selfcheck, "errors", fail)
    with pytest.raises(torch.OutOfMemoryError):
        selfcheck.checked(call)
    monkeypatch.setattr(selfcheck, "errors", lambda *args, **options: {"heads": 0.0})
    assert selfcheck.checked(call).error is None
