"""What a kind of attention costs on a GPU by each backend, where that was measured.

A test holds that the rule of :mod:`.auto` takes the fastest in each cell. Numbers are picoseconds a score of one head, forward and
backward, in bfloat16 under causality, on an H100 or H200.
"""

from __future__ import annotations

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


def cell(call: AttentionCall) -> Cell:
    rules = (call.score_mixing, call.prob_mixing if call.mixes_weights else None)
    before, after = (None if rule is None else type(rule) for rule in rules)
    return Cell(before, after, call.activation, call.scores.shape[1], call.v.size(3))


def is_measured(call: AttentionCall) -> bool:
    """Return True if times of calls like ``call`` were measured: each head with its own key and value, and no dropout."""
    own = call.dot_product.k.size(1) == call.v.size(1) == call.scores.shape[1]
    return own and call.v.size(3) == call.dot_product.q.size(3) and not call.dropout_p and cell(call) in MEASURED


def fastest(call: AttentionCall) -> str | None:
    """Return the backend that was measured as the fastest for calls like ``call``, or ``None``."""
    if not is_measured(call):
        return None
    cost = MEASURED[cell(call)]
    return min(cost, key=cost.__getitem__)


def describe(call: AttentionCall) -> str:
    """Say what was measured for calls like ``call``; nothing if nothing was."""
    if not is_measured(call):
        return ""
    cost = sorted(MEASURED[cell(call)].items(), key=lambda item: item[1])
    return "measured, picoseconds a score: " + ", ".join(f"{name} {number:.1f}" for name, number in cost)
