"""Cost of a small call: a decoding step, and forward and backward, of a layer against fairseq's own MultiheadAttention.

    python benchmarks/overhead.py --output benchmarks/results/overhead.json

The sizes are small, so that the time is that of the calls and not of the arithmetic. On a GPU these calls become launches.
Times are processor seconds of one thread. The layers take turns in every round; a ratio is the median of the ratios
within a round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import measure
import torch
from fairseq.modules.multihead_attention import MultiheadAttention
from torch import nn

from fairseq_lowrank.attention import AttentionConfig, AttentionSpec
from fairseq_lowrank.plugin.layer import FairseqAttention

FAIRSEQ = "fairseq"
GOALS = {
    "decoding": {"mha": 1.1, "mixhead-a": 1.5, "mixhead-b": 1.6},
    "training": {"mha": 1.0, "mixhead-a": 1.5, "mixhead-b": 1.6},
}
"""The ratios to keep, by what is measured and preset."""


def build(name: str, options: argparse.Namespace) -> nn.Module:
    """Return fairseq's self-attention, or that of a preset."""
    torch.manual_seed(0)
    if name == FAIRSEQ:
        return MultiheadAttention(options.embed_dim, options.heads, self_attention=True)
    spec = AttentionSpec.from_preset(name)
    return FairseqAttention(AttentionConfig(spec, options.embed_dim, options.heads, self_attention=True))


def decoding(layer: nn.Module, options: argparse.Namespace) -> Callable[[], None]:
    """Return a function that decodes ``options.length`` positions, a step each, from an empty state."""
    layer.eval()
    steps = torch.randn(options.length, 1, options.batch, options.embed_dim)

    def run() -> None:
        with torch.no_grad():
            for _ in range(options.repeats):
                state: dict = {}
                for x in steps:
                    layer(x, x, x, incremental_state=state, need_weights=False)

    return run


def training(layer: nn.Module, options: argparse.Namespace) -> Callable[[], None]:
    """Return a function that runs forward and backward under fairseq's causal mask, as often as the other makes steps."""
    layer.train()
    x = torch.randn(options.length, options.batch, options.embed_dim, requires_grad=True)
    cotangent = torch.randn_like(x)
    mask = torch.full((options.length,) * 2, float("-inf")).triu(1)

    def run() -> None:
        for _ in range(options.length * options.repeats):
            layer(x, x, x, attn_mask=mask, need_weights=False)[0].backward(cotangent)
            layer.zero_grad(set_to_none=True)
            x.grad = None

    return run


def compare(kind: Callable, options: argparse.Namespace) -> list[dict]:
    """Return a row for each layer: microseconds of a call, and the ratio to fairseq's module."""
    names = (FAIRSEQ, *options.presets)
    runs = {name: kind(build(name, options), options) for name in names}
    times = measure.alternate(runs, options.rounds, kind.__name__, options.clock)
    calls = options.length * options.repeats
    rows = []
    for name in names:
        q1, ratio, q3 = measure.quartiles(measure.ratios(times[name], times[FAIRSEQ]))
        rows.append(
            {
                "call": kind.__name__,
                "layer": name,
                "microseconds": round(measure.quartiles(times[name])[1] / calls * 1e6, 1),
                "ratio": round(ratio, 2),
                "quartiles": [round(q1, 2), round(q3, 2)],
                "goal": GOALS[kind.__name__].get(name),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["mha", "mixhead-a", "mixhead-b"], metavar="PRESET")
    parser.add_argument("--embed-dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=16, help="positions (default: 16)")
    parser.add_argument("--repeats", type=int, default=4, help="sequences of a measurement (default: 4)")
    measure.add_common_arguments(parser, rounds=41)
    parser.set_defaults(clock="processor", threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = [row for kind in (decoding, training) for row in compare(kind, options)]
    header = ("call", "layer", "µs", f"× {FAIRSEQ}", "quartiles", "goal")
    print(measure.table((row.values() for row in results), header))
    settings = {key: value for key, value in vars(options).items() if key != "output"}
    measure.write(options.output, {"machine": measure.machine("cpu"), "settings": settings, "results": results})


if __name__ == "__main__":
    main()
