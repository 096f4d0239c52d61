"""One attention operation of exchangeable parts, computed by interchangeable backends. See :class:`AttentionCall`."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_lowrank.ops.attention import blocked, gpu_times, operator, reference, sdpa, tiled, triton  # noqa: F401 (registers the operators)
from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.mask import AttentionMask
from fairseq_lowrank.ops.attention.mixing import DiagonalMixing, HeadMixing, PositionwiseMixing, StaticMixing
from fairseq_lowrank.ops.attention.relative import Relative
from fairseq_lowrank.ops.attention.scores import DotProduct, Scores
from fairseq_lowrank.ops.attention.synthesizer import RandomSynthesizer
from fairseq_lowrank.ops.attention.tree import hides_values, is_traced

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
# Each backend has ``compute(call)``, ``unsupported_reason(call)``, which is read when a layer is built, and
# ``device_unsupported_reason(device, dtype)``, which is read when it runs.
_BACKENDS = {"reference": reference, "sdpa": sdpa, "blocked": blocked, "triton": triton, "tiled": tiled}
BACKENDS = ("auto", *_BACKENDS)


class _Preference(NamedTuple):
    """What "auto" takes on a kind of device, as measured there, or counted (docs/performance.md)."""

    reference_scores: int = 0
    """Below so many scores, over the heads of a batch entry, fewer and simpler steps win over fewer bytes."""
    mask_scores: int = 0
    """Up to so many scores of one head, SDPA with a mask that is a tensor wins over blocks that need none."""
    blocked_keys: range = range(0)
    """So many keys shared by heads under causality are faster in blocks than in SDPA."""
    small_head: int = 0
    """Heads up to this size are faster in blocks than in SDPA, from 16 queries and keys on."""
    small_head_keys: int = 0
    """They are up to so many keys under causality, and up to a quarter of them without it."""
    sdpa_drops: bool = True
    """Whether SDPA drops weights without making all of them."""
    sdpa_of_two_sizes: bool = True
    """Whether SDPA takes values of another size than keys without making all weights."""
    triton: tuple[torch.dtype, ...] = ()
    """Dtypes in which our kernels win over blocks."""
    value_columns: int = 0
    """Up to so many columns of values, those of all heads side by side, SDPA of each of these values wins over blocks that
    mix heads by one M, in those dtypes."""


_PREFERENCES = {
    "cpu": _Preference(4096, 1024, range(256, 1024), 8, 2048, sdpa_drops=False, sdpa_of_two_sizes=False),
    "cuda": _Preference(triton=(torch.bfloat16, torch.float16), value_columns=256),
}


_ANY_DEVICE = _Preference()


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
    return (_fastest(call) if backend == "auto" else _requested(backend, call)).compute(call)


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


def _fastest(call: AttentionCall) -> Any:
    for module in _preference(call):
        if module is reference:  # computes every call on every device
            break
        if module.unsupported_reason(call) is not None:
            continue
        if module.device_unsupported_reason(call.v.device, call.v.dtype) is not None:
            continue
        if module not in (tiled, triton) or triton.keeps_registers(call, "tiled" if module is tiled else "triton"):
            return module
    return reference


def explain(call: AttentionCall) -> str:
    """Say what ``auto`` takes for ``call``, and on a GPU why."""
    name = _name(_fastest(call))
    prefer = _PREFERENCES.get(call.v.device.type, _ANY_DEVICE)
    return gpu_times.reason(call, name) if call.v.dtype in prefer.triton else name


def _name(module: ModuleType) -> str:
    return next(name for name, one in _BACKENDS.items() if one is module)


def _requested(backend: str, call: AttentionCall) -> Any:
    module = check_backend(backend, call)
    if module in (blocked, triton, tiled) and is_traced(call.v) and torch.onnx.is_in_onnx_export():
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
    if (reason := _BACKENDS[backend].device_unsupported_reason(device, dtype)) is not None:
        taken = f", which takes {_name(_fastest(call))!r}" if _PREFERENCES.get(device.type, _ANY_DEVICE).triton else ""
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
    if backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")
    if (reason := _BACKENDS[backend].unsupported_reason(call)) is not None:
        remedy = "use backend='auto' or 'reference'"
        if _BACKENDS[backend] in (tiled, triton):
            remedy = f"use backend='auto', which takes {_taken_on_gpus(call)!r} on a GPU, or 'reference'"
        raise ValueError(f"backend={backend!r} cannot compute {reason}; {remedy}")
    return _BACKENDS[backend]


def _taken_on_gpus(call: AttentionCall) -> str:
    """Return what ``auto`` takes on a GPU in half precision, of long sequences, for a call that our kernels refuse in part."""
    alone = not call.mixes_weights and not sdpa.needs_whole_tensor(call)
    names = (*(("sdpa",) if alone else ()), "triton", "blocked", "reference")
    return next(name for name in names if _BACKENDS[name].unsupported_reason(call) is None)


def _preference(call: AttentionCall) -> tuple[ModuleType, ...]:
    """Return the backends from the fastest to the slowest."""
    v, mixes = call.v, call.mixes_weights
    prefer = _PREFERENCES.get(v.device.type, _ANY_DEVICE)
    fused: tuple[ModuleType, ...] = ()
    if mixes and v.dtype not in prefer.triton and not is_traced(v) and call.scores.shape[2] == 1:
        return (reference,)  # checked first, because every decoding step comes here
    if v.dtype in prefer.triton and triton.unsupported_reason(call) is None:
        names = gpu_times.kernels(call)
        # A traced call is not tried on its device, so it takes only kernels that were timed or compiled elsewhere.
        known = not is_traced(v) or triton.is_precompiled_config(call)
        fused = tuple(_BACKENDS[name] for name in names if known or name != "triton")
    if hides_values(v):
        # Under torch.func, other backends have first derivatives in reverse mode alone. ONNX has no operator of this package.
        if not is_traced(v) or torch.onnx.is_in_onnx_export():
            return (reference,)
        # One choice for all lengths.
        avoid = mixes or call.dropout_p or sdpa.needs_whole_tensor(call) or sdpa.has_two_sizes(call)
        return (*fused, blocked, reference) if avoid else (sdpa, *fused, blocked, reference)
    _, heads, queries, keys = call.scores.shape
    shared = v.size(1) < heads
    # The scores of one query are no tensor of size T×S.
    few = queries == 1 or (heads * queries * keys < prefer.reference_scores and not shared)
    others = (*fused, reference, blocked) if few else (*fused, blocked, reference)
    if mixes:
        if v.dtype not in prefer.triton or not _repeats_cheaply(call, prefer):
            return others
        return (sdpa, *others) if gpu_times.prefers_sdpa(call) else (*fused, sdpa, *others)
    drops = call.dropout_p and not prefer.sdpa_drops
    whole = sdpa.needs_whole_tensor(call) or (sdpa.has_two_sizes(call) and not prefer.sdpa_of_two_sizes)
    if drops or (whole and queries * keys > prefer.mask_scores):
        # SDPA would build a T×S tensor: all weights, or the mask.
        return others
    causal = sdpa.hides_later_keys(call)
    most = prefer.small_head_keys if causal else prefer.small_head_keys // 4
    small = v.size(3) <= prefer.small_head and queries >= 16 and 16 <= keys <= most
    if small or (shared and causal and keys in prefer.blocked_keys):
        return blocked, sdpa, reference
    return sdpa, *others


def _repeats_cheaply(call: AttentionCall, prefer: _Preference) -> bool:
    """Return True if SDPA once for each value costs less than blocks that mix heads, by operations and bytes."""
    if not isinstance(call.prob_mixing, StaticMixing):
        return False
    # A mask that is a tensor would be read once for each value.
    plain = not sdpa.has_other_masks(call) and not sdpa.needs_causal_tensor(call)
    few = sdpa.value_columns(call) <= min(prefer.value_columns, call.scores.shape[3] // 2)
    return plain and few and sdpa.is_fused(call)
