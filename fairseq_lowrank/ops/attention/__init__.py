"""One attention operation of exchangeable parts, computed by interchangeable backends. See :class:`AttentionCall`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_lowrank.ops.attention import auto, operator, reference  # noqa: F401 (registers the operators)
from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.mask import AttentionMask
from fairseq_lowrank.ops.attention.mixing import DiagonalMixing, HeadMixing, PositionwiseMixing, StaticMixing
from fairseq_lowrank.ops.attention.relative import Relative
from fairseq_lowrank.ops.attention.scores import DotProduct, Scores
from fairseq_lowrank.ops.attention.synthesizer import RandomSynthesizer
from fairseq_lowrank.ops.attention.tree import is_traced

__all__ = [
    "BACKENDS",
    "AttentionCall",
    "AttentionMask",
    "DiagonalMixing",
    "DotProduct",
    "HeadMixing",
    "PositionwiseMixing",
    "RandomSynthesizer",
    "Relative",
    "Scores",
    "StaticMixing",
    "attention",
]

_SDPA = F.scaled_dot_product_attention  # what context parallelism replaces
BACKENDS = ("auto", *auto.BACKENDS)


def attention(call: AttentionCall, backend: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Compute multi-head attention over projected heads.

    Args:
        call: the tensors and the choices.
        backend: one of :data:`BACKENDS`; ``auto`` takes the fastest that can compute it.

    Returns:
        ``[B, H, T, Dv]`` heads in the dtype of ``call.v``, and the weights ``[B, H, T, S]`` (float32 or better) or ``None``.

    Raises:
        ValueError: shapes or dtypes that do not fit, an unknown choice, or a backend that cannot compute the call.
    """
    call.check()
    return compute(call, backend)


def compute(call: AttentionCall, backend: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Compute a call that needs no :meth:`check <AttentionCall.check>`. See :func:`attention`."""
    if F.scaled_dot_product_attention is not _SDPA or type(call.v) is not Tensor:
        _refuse_sequence_parts(call)
    module = auto.BACKENDS[auto.fastest(call)] if backend == "auto" else _requested(backend, call)
    return module.compute(call)


def _refuse_sequence_parts(call: AttentionCall) -> None:
    """Check that a worker has whole sequences.

    Raises:
        ValueError: PyTorch's context parallelism has split them. It joins them in its own function in place of SDPA alone.
    """
    replaced = str(getattr(F.scaled_dot_product_attention, "__module__", "")).startswith("torch.distributed")
    if replaced or any(place.is_shard(2) for place in getattr(call.v, "placements", ())):
        raise ValueError(
            "context parallelism of attention is not computed: each worker would attend to its own part of the sequence. Leave out "
            "context_parallel (in accelerate, ParallelismConfig with cp_size=1 and sp_size=1), and use fully_shard."
        )


def _requested(backend: str, call: AttentionCall) -> Any:
    module = check_backend(backend, call)
    if backend in ("blocked", *auto.KERNELS) and is_traced(call.v) and torch.onnx.is_in_onnx_export():
        raise ValueError(
            f"backend={backend!r} is the operator fairseq_lowrank::{backend}_attention, which ONNX does not have; use backend='auto'"
        )
    check_device(backend, call)
    return module


def check_device(backend: str, call: AttentionCall) -> None:
    """Check that a backend, which is not ``auto``, runs on the device of ``call`` in its dtype.

    Raises:
        ValueError: it does not.
    """
    device, dtype = call.v.device, call.v.dtype
    if (reason := auto.BACKENDS[backend].device_unsupported_reason(device, dtype)) is not None:
        taken = f", which takes {auto.fastest(call)!r}" if device.type == "cuda" else ""
        raise ValueError(
            f"backend={backend!r} does not run on {device.type} in {dtype}: {reason}; use backend='auto'{taken}"
        )


def check_backend(backend: str, call: AttentionCall) -> Any:
    """Return the backend of this name if it can compute calls like this one; ``None`` for ``auto``.

    Raises:
        ValueError: an unknown name, or a backend that cannot compute ``call``.
    """
    if backend == "auto":
        return None
    if backend not in auto.BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")
    module = auto.BACKENDS[backend]
    if (reason := module.unsupported_reason(call)) is not None:
        taken = f", which takes {auto.taken_on_gpus(call)!r} on a GPU," if backend in auto.KERNELS else ""
        raise ValueError(f"backend={backend!r} cannot compute {reason}; use backend='auto'{taken} or 'reference'")
    return module
