"""What ``auto`` takes: the first row of :data:`RULE` that fits a call and whose backend computes it on its device.

The page ``docs/kernels.md`` shows the same rows. The cells that were timed on GPUs are in :mod:`.gpu_times`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch

from fairseq_lowrank.ops.activation import without_autocast
from fairseq_lowrank.ops.attention import blocked, gpu_times, reference, sdpa, tiled, triton
from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.mixing import StaticMixing
from fairseq_lowrank.ops.attention.tree import hides_values, is_traced

# Each backend has ``compute(call)``, ``unsupported_reason(call)``, which is read when a layer is built, and
# ``device_unsupported_reason(device, dtype)``, which is read when it runs.
BACKENDS: dict[str, ModuleType] = {
    "reference": reference,
    "sdpa": sdpa,
    "blocked": blocked,
    "triton": triton,
    "tiled": tiled,
}
KERNELS = ("tiled", "triton")
"""Backends of our own GPU kernels, the preferred first. ``triton`` is deprecated."""
MOST_FEW_SCORES = 4096
"""On a CPU, with fewer scores over the heads of a batch entry, fewer and simpler steps win over fewer bytes."""
MOST_MASK_SCORES = 1024
"""On a CPU, up to so many scores of one head, SDPA with a mask that is a tensor wins over blocks that need none."""
MOST_VALUE_COLUMNS = 256
"""Up to so many columns of values, those of all heads side by side, SDPA of each of these values wins over blocks that mix heads."""


class Cells(NamedTuple):
    """Unmixed softmax attention on a CPU that is faster in blocks than in SDPA, from 16 queries on."""

    causal: bool
    keys: range
    dims: range = range(1, 1 << 31)
    """Sizes of a head."""
    shared: tuple[bool, ...] = (False, True)
    """Whether heads share a key or value."""
    most_threads: float = math.inf
    """Threads of torch at most. SDPA spreads heads over threads; blocks spread one product after another."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


# The last three: benchmarks/results/blocks-*.json, 0.67 to 0.95 of SDPA's time in training.
FASTER_IN_BLOCKS = (
    Cells(causal=True, keys=range(16, 2049), dims=range(1, 9)),
    Cells(causal=False, keys=range(16, 513), dims=range(1, 9)),
    Cells(causal=True, keys=range(256, 1024), shared=(True,)),
    Cells(causal=True, keys=range(256, 513), dims=range(17, 33), most_threads=1, dtypes=(torch.float32,)),
    Cells(causal=True, keys=range(256, 1025), dims=range(33, 129), most_threads=1, dtypes=(torch.float32,)),
    Cells(causal=True, keys=range(256, 1025), dims=range(65, 129), most_threads=2, dtypes=(torch.float32,)),
)


class Row(NamedTuple):
    """A row of the rule: backends, the calls that take them, in words, and the same as a function."""

    backends: tuple[str, ...]
    calls: str
    fits: Callable[[AttentionCall], bool]


def _kind(call: AttentionCall) -> str:
    return call.v.device.type


def _is_opaque(call: AttentionCall) -> bool:
    return hides_values(call.v) and (not is_traced(call.v) or torch.onnx.is_in_onnx_export())


def _may_run_kernels(call: AttentionCall) -> bool:
    return _kind(call) == "cuda" and call.v.dtype in tiled.DTYPES


def _is_few(call: AttentionCall) -> bool:
    """A compiled call has one choice for all lengths. The scores of one query are no tensor of size T×S."""
    if is_traced(call.v):
        return False
    _, heads, queries, keys = call.scores.shape
    own = call.v.size(1) == heads
    return queries == 1 or (own and heads * queries * keys < MOST_FEW_SCORES and _kind(call) == "cpu")


def _suits_sdpa(call: AttentionCall) -> bool:
    """Not where SDPA would store a T×S tensor: of a mask, and on a CPU of dropped weights or with values of another size."""
    if call.mixes_weights:
        return False
    on_cpu = _kind(call) == "cpu"
    if on_cpu and call.dropout_p:
        return False
    if not (sdpa.needs_whole_tensor(call) or (on_cpu and sdpa.has_two_sizes(call))):
        return True
    small = on_cpu and not is_traced(call.v)
    return small and call.scores.shape[2] * call.scores.shape[3] <= MOST_MASK_SCORES


def _is_faster_in_blocks(call: AttentionCall) -> bool:
    if call.mixes_weights or _kind(call) != "cpu" or is_traced(call.v):
        return False
    _, heads, queries, keys = call.scores.shape
    dim, shared = call.v.size(3), call.v.size(1) < heads
    return queries >= 16 and any(
        [
            cells.causal == sdpa.hides_later_keys(call) and _suits_sdpa(call)
            for cells in FASTER_IN_BLOCKS
            if keys in cells.keys and dim in cells.dims and shared in cells.shared
            if torch.get_num_threads() <= cells.most_threads and call.v.dtype in cells.dtypes
        ]
    )


def _repeats_cheaply(call: AttentionCall) -> bool:
    """SDPA once for each value costs less than blocks that mix heads, by operations and bytes."""
    if not isinstance(call.prob_mixing, StaticMixing) or not _may_run_kernels(call) or is_traced(call.v):
        return False
    few = sdpa.value_columns(call) <= min(MOST_VALUE_COLUMNS, call.scores.shape[3] // 2)
    # A mask that is a tensor would be read once for each value.
    plain = few and not sdpa.has_other_masks(call) and not sdpa.needs_causal_tensor(call)
    return plain and sdpa.is_fused(call)


def _was_fastest_in_sdpa(call: AttentionCall) -> bool:
    return _repeats_cheaply(call) and gpu_times.fastest(call) == "sdpa"


RULE = (
    Row(("reference",), "under `torch.func` or in an export to ONNX", _is_opaque),
    Row(("blocked",), "unmixed heads on a CPU, in the cells where blocks were timed as faster (`FASTER_IN_BLOCKS`)", _is_faster_in_blocks),
    Row(("sdpa",), "other unmixed heads, if SDPA would store no T×S tensor, or on a CPU one of at most 1,024 scores", _suits_sdpa),
    Row(("reference",), "a single query, or on a CPU fewer than 4,096 scores of heads with own keys; not in compiled models", _is_few),
    Row(("sdpa",), "mixed heads on a GPU, in the cells where a call for each value was timed as fastest (`gpu_times`)", _was_fastest_in_sdpa),
    Row(KERNELS, "on a GPU in half precision, if a check on that GPU found these kernels right", _may_run_kernels),
    Row(("sdpa",), "there, one mixing matrix after the softmax, at most 256 columns of values, no mask but causality", _repeats_cheaply),
    Row(("blocked", "reference"), "all other calls; only `reference` returns weights and caps scores", lambda call: True),
)  # fmt: skip


def fastest(call: AttentionCall) -> str:
    """Return the name of the backend that ``auto`` takes."""
    for row in RULE:
        if row.fits(call):
            for name in row.backends:
                if _computes(name, call):
                    return name
    return "reference"


def _computes(name: str, call: AttentionCall) -> bool:
    """Return True if a backend computes ``call`` on its device. What compilers trace is checked where it runs."""
    backend = BACKENDS[name]
    if backend is reference:
        return True
    if backend.unsupported_reason(call) is not None:
        return False
    if backend.device_unsupported_reason(call.v.device, call.v.dtype) is not None:
        return False
    return name not in KERNELS or is_traced(call.v) or _is_right_here(name, call)


def _is_right_here(name: str, call: AttentionCall) -> bool:
    from fairseq_lowrank.ops.attention import selfcheck

    with without_autocast(call.v):
        plain = call if call.mixes_weights else call.replace(prob_mixing=None)
        fits = selfcheck.checked(plain, name).fits
        return fits and selfcheck.is_verified(plain, name, triton.fallback(plain, name).name)


def explain(call: AttentionCall) -> str:
    """Say what ``auto`` takes for ``call``, and what was measured."""
    measured = f" ({known})" if _may_run_kernels(call) and (known := gpu_times.describe(call)) else ""
    return fastest(call) + measured


def taken_on_gpus(call: AttentionCall) -> str:
    """Return what ``auto`` takes on a GPU in half precision, of long sequences, for a call that our kernels refuse in part."""
    alone = not call.mixes_weights and not sdpa.needs_whole_tensor(call)
    names = (*(("sdpa",) if alone else ()), *KERNELS, "blocked", "reference")
    return next(name for name in names if BACKENDS[name].unsupported_reason(call) is None)
