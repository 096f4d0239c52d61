"""The triton backend on a machine without a GPU: the tests of its kernels, interpreted, and what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fairseq_lowrank.attention import build_attention
from fairseq_lowrank.ops import AttentionMask, DotProduct
from fairseq_lowrank.ops.attention import AttentionCall, attention, triton

pytest.importorskip("triton", "3.3", reason="Triton has no wheel here, or is too old for these kernels")


def test_the_kernels_are_right_under_the_interpreter():
    """In a process of its own: Triton decides when it is imported, for all of its process."""
    folder = Path(__file__).parent
    files = [str(folder / name) for name in ("test_triton.py", "test_tiled.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files]
    run = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=folder.parents[2]
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]


def test_it_is_refused_on_a_cpu_in_one_line(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.randn(1, 2, 5, 4)
    expected = (
        r"^backend='triton' does not run on cpu in torch\.float32: its kernels are compiled for NVIDIA GPUs "
        r"\(TRITON_INTERPRET=1 in the environment interprets them on a CPU\); use backend='auto'$"
    )
    with pytest.raises(ValueError, match=expected):
        attention(AttentionCall(DotProduct(x, x), x, AttentionMask()), "triton")
    with pytest.raises(ValueError, match="only in float32, bfloat16 and float16"):
        attention(AttentionCall(DotProduct(x.double(), x.double()), x.double(), AttentionMask()), "triton")


def test_without_triton_it_is_refused(monkeypatch):
    monkeypatch.setattr(triton, "_INSTALLED", False)
    for kind in ("cpu", "cuda"):
        assert triton.device_unsupported_reason(torch.device(kind), torch.bfloat16) == "triton is not installed"


def test_with_an_old_triton_it_is_refused(monkeypatch):
    monkeypatch.setattr(triton, "_is_recent", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reason = triton.device_unsupported_reason(torch.device("cpu"), torch.float32)
    assert reason == "its kernels need Triton 3.3 or newer, which torch 2.7 brings"


def test_a_layer_that_it_cannot_compute_is_refused_when_it_is_built():
    build_attention("mixhead-a", 64, 32, backend="triton")
    with pytest.raises(ValueError, match="backend='triton' cannot compute mixing of 64 heads"):
        build_attention("mixhead-a", 64, 64, backend="triton")
    with pytest.raises(ValueError, match="cannot compute heads of size 160 "):
        build_attention("mha", 320, 2, backend="triton")


def test_shapes_come_out_on_the_meta_device():
    layer = build_attention("mixhead-b", 32, 4, self_attention=True, backend="triton").to("meta")
    x = torch.randn(5, 2, 32, device="meta", requires_grad=True)
    layer(x, x, x, need_weights=False)[0].sum().backward()
    assert x.grad.shape == x.shape


def test_triton_is_imported_only_where_it_computes():
    program = """
import sys, torch
from fairseq_lowrank.attention import build_attention
layer = build_attention("mixhead-b", 8, 2, self_attention=True)
x = torch.randn(3, 1, 8)
layer(x, x, x)[0].sum().backward()
build_attention("mixhead-b", 8, 2, self_attention=True, backend="triton")
assert "triton" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
