"""Deprecated for :mod:`.tiled`: attention in linear memory on a GPU, by fused kernels, for mixing across heads and sigsoftmax.

A program computes a block of queries, and for all heads at once where heads are mixed, since P̄_i = Σ_j M[j, i] P_j needs
the probabilities of all heads for the same queries and keys. It walks over the keys in tiles::

            keys →
          ┌────────────────┐   pass 1: lse = log Σ_s exp(logits)                          a number a row and head
    q  0  │▓▒              │   pass 2: P = exp(logits − lse) of a tile    [heads, rows, keys], in registers
    u  1  │▓▓▓▒            │           P̄ = Mᵀ P, one product H×H by H×(rows·keys); position-wise one a row
    e  2  │▓▓▓▓▓▒          │           output rows += P̄ v
    r  3  │▓▓▓▓▓▓▓▒        │
    ↓     └────────────────┘   ▓ computed  ▒ the diagonal, computed and masked  (rest) never touched

The backward pass computes each tile again, three times, so that no two programs add to the same number: Σ_s P ∘ dP of each
row with the gradient of M, then dq, a block of queries each, then dk and dv, a block of keys each. The same call gives the
same gradients, bit for bit. Dropout is drawn from the place of a weight, the same in every pass.

What a program computes is in :mod:`.kernels`, how large its tiles are in :mod:`.launch`, and :mod:`.selfcheck` tries both before
their first use; they are imported, and triton with them, when they are first needed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_lowrank.ops.activation import without_autocast
from fairseq_lowrank.ops.attention import blocked, recomputing
from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.mixing import DiagonalMixing, PositionwiseMixing, StaticMixing
from fairseq_lowrank.ops.attention.recomputing import RecomputeBackend
from fairseq_lowrank.ops.attention.scores import DotProduct

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_HEADS, MOST_DIM = 32, 128
_INSTALLED = importlib.util.find_spec("triton") is not None


def _is_recent() -> bool:
    """Return True if Triton's kernels take tuples as arguments. It is imported here, and not with this module.

    Compilers trace this function, and warn of a cache around it.
    """
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return what this backend cannot compute of ``call``, in words, or ``None``."""
    if (reason := call.for_blocks_alone) is not None:
        return reason
    if not isinstance(call.scores, DotProduct):
        return "scores other than dot products"
    if call.need_weights:
        return "the attention weights (need_weights)"
    for name in ("score_bias", "distance_bias"):
        if getattr(call, name) is not None:
            return f"a {name}"
    if (reason := call.mask.missing_in_kernels) is not None:
        return reason
    if call.mask.window is not None:
        return "a sliding window"
    if call.mask.bias is not None and call.mask.bias.requires_grad:
        return "a gradient of the float mask"
    if call.score_mixing is not None and not isinstance(call.score_mixing, StaticMixing | DiagonalMixing):
        return f"{type(call.score_mixing).__name__} of scores, before the softmax"
    if call.prob_mixing is not None and not isinstance(
        call.prob_mixing, StaticMixing | PositionwiseMixing | DiagonalMixing
    ):
        return f"{type(call.prob_mixing).__name__}"
    heads, dims = call.scores.shape[1], (call.dot_product.q.size(3), call.v.size(3))
    if (call.score_mixing is not None or call.mixes_weights) and not 2 <= heads <= MOST_HEADS:
        return f"mixing of {heads} heads (of 2 to {MOST_HEADS} alone)"
    if max(dims) > MOST_DIM:
        return f"heads of size {max(dims)} (of up to {MOST_DIM} alone)"
    return None


def device_unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why this backend does not run on a device in a dtype, or ``None``."""
    if dtype not in DTYPES:
        return "its kernels compute only in float32, bfloat16 and float16"
    if device.type == "meta":
        return None
    if not _INSTALLED:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        if device.type not in ("cpu", "cuda"):
            return "Triton's interpreter reads the memory of a CPU or a GPU"
    elif device.type != "cuda" or torch.version.cuda is None:
        return (
            "its kernels are compiled for NVIDIA GPUs (TRITON_INTERPRET=1 in the environment interprets them on a CPU)"
        )
    elif torch.cuda.get_device_capability(device) < (8, 0):
        return "its kernels need compute capability 8.0 or newer"
    return None if _is_recent() else "its kernels need Triton 3.3 or newer, which torch 2.7 brings"


def fallback(call: AttentionCall, backend: str) -> RecomputeBackend:
    """Return the backend that computes ``call`` where the kernels of ``backend`` cannot be used."""
    return BACKEND if backend == "tiled" and unsupported_reason(call) is None else blocked.BACKEND


def with_score_matrix(call: AttentionCall) -> AttentionCall:
    """Return ``call`` with a matrix that mixes scores where it had only a factor of each head."""
    if isinstance(call.score_mixing, DiagonalMixing):
        call = call.replace(score_mixing=StaticMixing(torch.diag(call.score_mixing.weight)))
    return call


def compute(call: AttentionCall) -> tuple[Tensor, None]:
    return recomputing.compute(with_score_matrix(call), BACKEND), None


def attend(call: AttentionCall, seed: int, backend: str = "triton") -> tuple[Tensor, Sequence[Tensor]]:
    """Compute the heads ``[B, H, T, Dv]`` by the kernels of a backend, and what its backward pass reads.

    If the kernels are wrong or do not fit on this device, :func:`fallback` computes them.
    """
    from fairseq_lowrank.ops.attention.selfcheck import LAUNCHES, is_verified

    with without_autocast(call.v):
        other = fallback(call, backend)
        if is_verified(call, backend, other.name):
            return LAUNCHES[backend](call, seed).forward()
        return other.forward(call, seed)


def input_gradients(
    call: AttentionCall, seed: int, grad_output: Tensor, kept: Sequence[Tensor], backend: str = "triton"
) -> list[Tensor | None]:
    """Compute the gradients of the tensors of ``call``, in its order; ``None`` for masks. What was not kept is computed again."""
    from fairseq_lowrank.ops.attention.selfcheck import LAUNCHES, is_verified

    with without_autocast(call.v):
        other = fallback(call, backend)
        if is_verified(call, backend, other.name):
            launch = LAUNCHES[backend](call, seed)
            return launch.backward(grad_output, *(kept or launch.forward()[1]))
        return other.backward(call, seed, grad_output, kept)


BACKEND = RecomputeBackend("triton", attend, input_gradients)
