"""Curves of depth against width: the rule L > log₃ d, and models with the same number of parameters (Wies et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fairseq_lowrank.tools.advice.checks import Stack


def widths(stack: Stack) -> list[int]:
    """Return widths from 1/8 to 8 times a stack's, four for each doubling; its own width and its rank are included."""
    steps = (round(stack.width * 2 ** (step / 4)) for step in range(-12, 13))
    return sorted({max(1, width) for width in steps} | {stack.width, stack.rank})


def curve(stack: Stack) -> list[dict]:
    """Return for each width the rule's least depth, and the depth with the same number of parameters in layers.

    Above log₃ d, depth and width both count, exponentially. Below it, another layer counts more than width. Beyond the rank r of
    the embedding, width does not count, so depth counts more at any L: `effective_width` is min(d, r), from the bound
    L · min(d, r) on the log separation rank (theorems 1 and 2). A layer has parameters proportional to d² (12·d² if the
    feed-forward size is 4d).
    """
    return [
        {
            "stack": stack.name,
            "width": width,
            "log3_width": round(math.log(width, 3), 3),
            "same_size_layers": round(stack.layers * (stack.width / width) ** 2, 2),
            "effective_width": min(width, stack.rank),
        }
        for width in widths(stack)
    ]


def plot_depth(stacks: Sequence[Stack], architecture: str):
    """Return a figure of depth against width, with a panel for each stack."""
    from fairseq_lowrank.tools import pictures

    figure, panels = pictures.grid(len(stacks), width=7.0, height=4.4)
    for stack, panel in zip(stacks, panels, strict=True):
        points = curve(stack)
        across = [point["width"] for point in points]
        rule = [point["log3_width"] for point in points]
        deepest = 4 * max(stack.layers, *rule)
        panel.plot(across, rule, color="#1f77b4", label="L = log₃ d: above it depth and width both count")
        same = [(point["width"], point["same_size_layers"]) for point in points]
        same = [(width, layers) for width, layers in same if layers <= deepest]
        panel.plot(*zip(*same, strict=True), "--", color="0.5", label="as many parameters in the layers")
        if stack.rank < across[-1]:
            panel.axvspan(stack.rank, across[-1], color="#d62728", alpha=0.12, linewidth=0)
            panel.axvline(
                stack.rank, color="#d62728", linewidth=1, label=f"embedding rank {stack.rank}: width beyond it idles"
            )
        panel.plot(stack.width, stack.layers, "o", color="#111111", label=f"L = {stack.layers}, d = {stack.width}")
        panel.set(
            xscale="log",
            xlim=(across[0], across[-1]),
            ylim=(0, deepest),
            xlabel="width d",
            ylabel="layers L",
            title=f"{architecture}, {stack.name}",
        )
        panel.set_xticks(ticks := [stack.width * 2**power for power in (-2, 0, 2)], [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.legend(fontsize=8)
    return figure
