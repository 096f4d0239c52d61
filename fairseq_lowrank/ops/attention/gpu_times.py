"""What a kind of attention costs on a GPU by each backend: measured where it was, and predicted elsewhere. ``auto`` reads it.

Numbers are picoseconds a score of one head, forward and backward, in bfloat16 under causality, on an H100 or H200.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.mixing import PositionwiseMixing, StaticMixing


class Cell(NamedTuple):
    """What was measured: mixing before and after the softmax, the activation, and number and size of heads."""

    before: type | None
    after: type | None
    activation: str
    heads: int
    dim: int


MEASURED: dict[Cell, dict[str, float]] = {
    Cell(None, StaticMixing, "softmax", 16, 64): {"tiled": 12.0, "triton": 25.7, "sdpa": 76.9, "blocked": 407.8},
    Cell(None, PositionwiseMixing, "softmax", 16, 64): {"tiled": 15.3, "triton": 28.1, "blocked": 128.7},
    Cell(StaticMixing, StaticMixing, "softmax", 16, 64): {"tiled": 21.3, "triton": 35.0},
    Cell(None, None, "sigsoftmax", 16, 64): {"tiled": 3.6, "triton": 20.8},
    Cell(None, StaticMixing, "softmax", 8, 64): {"tiled": 10.2, "triton": 44.6},
    Cell(None, StaticMixing, "softmax", 4, 64): {"sdpa": 21.5, "triton": 85.0, "blocked": 785.6},
}
"""Of n 8192 (``sdpa`` with 16 heads: 2048). Those of ``tiled`` are sums of its passes on an H200
(``benchmarks/results/gpu-tiles.json``), and those of 8 heads are of an H200 (``gpu-kernels.json``). The others are of an H100
(``gpu.json``)."""
TRITON = 24.3
"""Of 16 heads up to size 64: a tile costs a chain of dependent steps, whatever its number of heads (docs/kernels.md)."""
SDPA = 5.4
"""Of one value of 64 columns, which costs a call of all heads."""
ERROR = 0.25
"""Of a prediction."""


def cell(call: AttentionCall) -> Cell:
    rules = (call.score_mixing, call.prob_mixing if call.mixes_weights else None)
    before, after = (None if rule is None else type(rule) for rule in rules)
    return Cell(before, after, call.activation, call.scores.shape[1], call.v.size(3))


def is_measured(call: AttentionCall) -> bool:
    """Return True if times of calls like ``call`` were measured: each head with its own key and value, and no dropout."""
    own = call.dot_product.k.size(1) == call.v.size(1) == call.scores.shape[1]
    return own and call.v.size(3) == call.dot_product.q.size(3) and not call.dropout_p and cell(call) in MEASURED


def times(call: AttentionCall) -> dict[str, float]:
    """Return picoseconds a score of ``triton`` and, for one matrix after the softmax, of ``sdpa`` once for each value.

    A prediction stands where nothing was measured. It counts what was seen to matter: the heads of a tile, padded to 16, and the
    values that SDPA is called for.
    """
    if is_measured(call):
        return MEASURED[cell(call)]
    known, sizes = cell(call), [max(64, call.dot_product.q.size(3)), max(64, call.v.size(3))]
    mixes = known.before is not None or known.after is not None
    padded = max(16, 1 << (known.heads - 1).bit_length())
    predicted = {"triton": TRITON * (padded / known.heads if mixes else 1.0) * max(sizes) / 64}
    if known.before is None and known.after is StaticMixing:
        predicted["sdpa"] = SDPA * call.v.size(1) * sum(sizes) / 128
    return predicted


def kernels(call: AttentionCall) -> list[str]:
    """Return the backends of our kernels from the fastest to the slowest: ``tiled`` only where it was measured."""
    cost = MEASURED[cell(call)] if is_measured(call) else {}
    if "tiled" not in cost:
        return ["triton"]
    return ["tiled", "triton"] if cost["tiled"] < cost["triton"] else ["triton", "tiled"]


def prefers_sdpa(call: AttentionCall) -> bool:
    """Return True if SDPA once for each value is faster than the kernels that mix: measured, or predicted beyond the error."""
    cost = times(call)
    return cost.get("sdpa", math.inf) < cost[kernels(call)[0]] * (1.0 if is_measured(call) else 1.0 - ERROR)


def reason(call: AttentionCall, chosen: str) -> str:
    """Say in words why ``auto`` takes the backend of this name."""
    kind = "measured" if is_measured(call) else "predicted"
    known = ", ".join(f"{name} {number:.1f}" for name, number in sorted(times(call).items(), key=lambda item: item[1]))
    return f"{chosen} ({kind}, picoseconds a score: {known})"
