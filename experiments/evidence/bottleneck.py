"""Draw the low-rank bottleneck: how well a head of each size fits random patterns, and which repairs a task needs.

Left: the scores Q Kᵀ of one head are fitted to random positive patterns of 16 positions, without a mask and with a causal one.
No model is trained: queries and keys are free, so the error is what the head size alone costs. Right: recorded trainings of the
task that needs one score of full rank (docs/evidence/heads.md).

    python -m experiments pictures bottleneck --output docs/pictures
"""

import math
from statistics import fmean

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.class_styles import class_style
from experiments.controlled.runs import geometric_mean
from experiments.evidence.lines import values
from fairseq_lowrank.tools import pictures

LENGTH, PATTERNS, SHOWN = 16, 5, 1e-5
ROWS = {  # the row's name, its label, and its class
    "h8-mha": ("mha", "equal"),
    "h8-gain": ("one factor per head", "equal"),
    "h8-mixhead-a": ("mixing after softmax", "OV"),
    "h8-values-32": ("values of 32", "OV"),
    "h8-queries-32": ("queries and keys of 32", "QK"),
    "h8-collaborative": ("shared queries, keys", "QK"),
    "h8-score-mixing": ("mixing before softmax", "QK"),
}
CLASSES = {
    "equal": "plain attention, and its control",
    "OV": "wider from values to outputs (OV)",
    "QK": "scores of higher rank (QK)",
}


def random_patterns(causal: bool) -> Tensor:
    """Return random patterns `[patterns, n, n]`, each row uniform over the positions that it sees."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.empty(PATTERNS, LENGTH, LENGTH, dtype=torch.float64).exponential_(generator=generator)
    weights = weights.tril() if causal else weights
    return weights / weights.sum(-1, keepdim=True)


def errors(causal: bool, steps: int = 1500) -> list[float]:
    """Return the geometric mean of ‖P̂ − P‖ / ‖P‖ for each head size from 1 to n.

    L-BFGS minimises the cross entropy of P̂ from queries and keys `[patterns, n, size]`. It starts at the truncated singular value
    decomposition of the scores.
    """
    wanted = random_patterns(causal)
    hidden = torch.ones(LENGTH, LENGTH).triu(1).bool() if causal else torch.zeros(LENGTH, LENGTH).bool()
    scores = torch.where(hidden, 0.0, wanted.log())
    scores = torch.where(hidden, 0.0, scores - scores.sum(-1, keepdim=True) / (~hidden).sum(-1, keepdim=True))
    u, s, vt = torch.linalg.svd(scores)
    found = []
    for size in range(1, LENGTH + 1):
        root = s[:, None, :size].sqrt() + 1e-3
        query, key = ((side[..., :size] * root).contiguous().requires_grad_() for side in (u, vt.mT))

        def pattern(query: Tensor = query, key: Tensor = key) -> Tensor:
            return (query @ key.mT).masked_fill(hidden, -math.inf).log_softmax(-1)

        optimizer = torch.optim.LBFGS([query, key], max_iter=steps, history_size=50, line_search_fn="strong_wolfe")

        def loss(pattern=pattern, optimizer=optimizer) -> Tensor:
            optimizer.zero_grad()
            value = -(wanted * pattern().masked_fill(hidden, 0.0)).sum()
            value.backward()
            return value

        optimizer.step(loss)
        with torch.no_grad():
            difference = (pattern().exp() - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
        found.append(geometric_mean([max(error, SHOWN) for error in difference.tolist()]))
    return found


def recorded() -> dict[str, float]:
    """Return the mean squared error of each row over its seeds."""
    return {row: fmean(values("nearest-point", row, file="evidence-nearest-point.jsonl").values()) for row in ROWS}


def figure() -> Figure:
    """Return a figure with both panels."""
    drawn, (left, right) = pictures.grid(2, width=5.4, height=3.8)
    sizes = range(1, LENGTH + 1)
    for causal, label, line, colour in ((False, "no mask", "o-", "#0072b2"), (True, "causal mask", "s--", "#a02000")):
        left.plot(sizes, errors(causal), line, color=colour, markersize=4, label=label)
        enough = (LENGTH - 1) / 2 if causal else LENGTH - 1
        left.axvline(enough, color=colour, linewidth=1, linestyle=":")
        name = "(n − 1)/2" if causal else "n − 1"
        left.annotate(name, (enough, 0.5), xytext=(-4, 0), textcoords="offset points", color=colour, ha="right")
    left.set(
        xlabel="head size d_k",
        ylabel="relative error of the best fit found",
        yscale="log",
        xticks=(1, 4, 8, 12, 15),
        title=f"One head, random patterns, n = {LENGTH}",
    )
    left.legend(loc="lower left", fontsize=8, title="errors below 1e-5 at 1e-5", title_fontsize=8)
    found = recorded()
    for place, (row, (_, kind)) in enumerate(ROWS.items()):
        right.barh(place, found[row], color=class_style(kind)["color"])
        right.annotate(f" {found[row]:.3f}", (found[row], place), va="center", fontsize=8)
    right.set_yticks(range(len(ROWS)), [label for label, _ in ROWS.values()])
    right.invert_yaxis()
    right.set(xlabel="squared error (less is better)", xlim=(0, 1), title="8 heads of 4, task of rank 32")
    handles = [right.barh(0, 0, color=class_style(kind)["color"], label=label) for kind, label in CLASSES.items()]
    right.legend(handles=handles, loc="lower right", fontsize=8)
    return drawn
