"""Nearest point on the sphere: a task that one head of full rank solves and heads of low rank do not.

N points x_i are uniform on the sphere S^{d−1}. y_i is the point x_j with the least ⟨x_i, x_j⟩, which is the point nearest to −x_i.
The metric is the squared error E‖ŷ_i − y_i‖², with new points in each update; the output 0 has 1. Source: Amsel, Yehudai and
Bruna, "On the Benefits of Rank in Attention Layers" (arXiv 2407.16153). One head with W_Q W_Kᵀ = −β I and large β computes the
answer; with ranks well below d, exponentially many heads are needed.

As published: one post-norm layer with attention and a ReLU feed-forward part, each followed by x ↦ s·x/‖x‖ with one learned s;
AdamW, 1e-2, betas 0.9 and 0.95, no weight decay, warm-up over the first 5 % of updates and a cosine to 0, batches of 256.
Differences: d 32 instead of 64, 10,000 updates instead of 100,000, feed-forward of 4·d instead of 32·d. The value is the error
of the trained layer on 16,384 new sets of points, the same for all rows of a seed.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.controlled.runs import (
    Log,
    Method,
    Run,
    outcome_on_new_problems,
    styles_of,
    trained_on_new_problems,
)
from fairseq_lowrank.attention import METHODS, build_attention

TABLE = "nearest-point"
METRIC = "squared error"
SPLIT = "fresh points"
ARCHITECTURE = "one post-norm layer, d 32"
EMBED_DIM = 32
POINTS = 16
FFN_DIM = 4 * EMBED_DIM
BATCH = 256
STEPS = 10_000
LEARNING_RATE = 1e-2
TEST_BATCHES = 64
SEEDS = (1, 2, 3)

PUBLISHED = {1: 0.87, 2: 0.86, 4: 0.86, 8: 0.84, 16: 0.80, 32: 0.69, 64: 0.015}
"""Squared error by rank d/h for d 64, N 16 and one layer, read off the figure."""


def points(batch: int, generator: torch.Generator) -> Tensor:
    """Return points ``[N, batch, d]``, uniform on the sphere."""
    return F.normalize(torch.randn(POINTS, batch, EMBED_DIM, generator=generator), dim=-1)


def answers(x: Tensor) -> Tensor:
    """Return for each point of ``[N, batch, d]`` the point with the least inner product."""
    nearest = torch.einsum("ibd,jbd->bij", x, x).argmin(-1)
    return x.transpose(0, 1).take_along_dim(nearest.unsqueeze(-1), dim=1).transpose(0, 1)


class Layer(nn.Module):
    """One post-norm Transformer layer over ``[N, batch, d]``."""

    def __init__(self, method: Method, heads: int) -> None:
        super().__init__()
        self.attention = build_attention(method.preset, EMBED_DIM, heads, self_attention=True, **method.axes)
        self.fc1, self.fc2 = nn.Linear(EMBED_DIM, FFN_DIM), nn.Linear(FFN_DIM, EMBED_DIM)
        self.scales = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.scales[0] * F.normalize(x + self.attention(x, x, x, need_weights=False)[0], dim=-1)
        return self.scales[1] * F.normalize(x + self.fc2(F.relu(self.fc1(x))), dim=-1)


def squared_error(layer: nn.Module, x: Tensor) -> Tensor:
    """Return ‖ŷ_i − y_i‖², averaged over points."""
    return (layer(x) - answers(x)).square().sum(-1).mean()


def fresh_error(layer: nn.Module, generator: torch.Generator) -> Tensor:
    """Return the error on new points."""
    return squared_error(layer, points(BATCH, generator))


def trained(method: Method, heads: int, seed: int, steps: int, log: Log) -> Layer:
    """Train one layer, and return it."""
    return trained_on_new_problems(lambda: Layer(method, heads), fresh_error, LEARNING_RATE, seed, steps, log)


def train(method: Method, heads: int, seed: int, steps: int, log: Log) -> dict:
    """Train one layer, and return ``value``, the squared error on new points, and ``parameters``."""
    return outcome_on_new_problems(trained(method, heads, seed, steps, log), fresh_error, TEST_BATCHES, seed)


def rows() -> Iterator[tuple[Method, int]]:
    """Yield every method and its number of heads, with those of the planned contrasts first."""
    mha = Method("mha", "mha")
    yield from ((mha, heads) for heads in (8, 1))
    yield Method("mixhead-a", "mixhead-a"), 8
    yield Method("score-mixing", "mha", {"score_mixing": "static"}), 8
    yield Method("queries-32", "mha", {"head_dim": 32, "value_dim": 4}), 8
    yield Method("values-32", "mha", {"value_dim": 32}), 8
    yield Method("fixedhead-32", "fixedhead", {"head_dim": 32}), 8
    yield Method("fixedhead-16", "fixedhead", {"head_dim": 16}), 8
    yield Method("mixhead-b", "mixhead-b"), 8
    yield Method("talking-heads", "talking-heads"), 8
    yield Method("gain", "gain"), 8
    yield Method("sigsoftmax", "mha", {"activation": "sigsoftmax"}), 8
    yield from ((mha, heads) for heads in (2, 4, 16, 32))
    yield Method("fixedhead-32", "fixedhead", {"head_dim": 32}), 4
    for heads in (4, 2):
        yield Method("mixhead-a", "mixhead-a"), heads
        yield Method("mixhead-b", "mixhead-b"), heads
        yield Method("score-mixing", "mha", {"score_mixing": "static"}), heads
        yield Method("talking-heads", "talking-heads"), heads
    for preset in ("gated", "mla", "dcmha", "diff", "xsa", "tpa", "gated-head", "collaborative"):
        yield Method(preset, preset), 8
    yield Method("mfa", "mfa", {"head_dim": 32}), 8
    for preset in ("lrkv", "knocking-linear", "mea", "structured"):
        yield Method(preset, preset), 8


def runs(seeds: Sequence[int] | None = None, *, quick: bool = False, steps: int | None = None) -> Iterator[Run]:
    """Yield every run, with all rows of a seed before the next seed.

    Args:
        seeds: by default 1 to 3, with ``quick`` 1.
        quick: only one head, eight heads, and eight heads mixed after the softmax.
        steps: number of updates. Another number than the task's makes separate rows; with fewer updates they are trials.
    """
    for seed in seeds or (SEEDS[:1] if quick else SEEDS):
        for method, heads in rows():
            if method.exists() and (not quick or (method.name in ("mha", "mixhead-a") and heads in (1, 8))):
                yield _run(method, heads, seed, steps)


def _run(method: Method, heads: int, seed: int, steps: int | None) -> Run:
    setting = {"heads": heads, "head_dim": method.axes.get("head_dim", EMBED_DIM // heads)}
    return Run(
        f"h{heads}-{method.name}",
        seed,
        method,
        STEPS if steps is None else steps,
        STEPS,
        setting,
        lambda seed, steps, log: train(method, heads, seed, steps, log),
    )


def _by_row(lines: list[dict]) -> dict[tuple[str, int], list[float]]:
    values: dict[tuple[str, int], list[float]] = {}
    for line in lines:
        values.setdefault((line["method"], line["heads"]), []).append(line["value"])
    return values


CLASSES = {
    "QK": "QK: scores of higher rank",
    "OV": "OV: a wider map from values to outputs",
    "patterns": "patterns by another route",
    "restricted": "restricted: tied or factored",
    "equal": "equal to plain attention",
}
OTHER_KINDS = dict.fromkeys(
    (
        *("score-mixing", "queries-32", "fixedhead-16", "fixedhead-32"),
        *("structured-layer-norm", "structured-query-norm"),  # earlier versions of structured
    ),
    "QK",
) | {"values-32": "OV"}


def kind_of(name: str) -> str:
    """Return the class of a method; that of plain attention is "equal"."""
    kind = METHODS[name].kind if name in METHODS else OTHER_KINDS.get(name)
    return kind or "equal"


def plot(lines: list[dict]):
    """Return a figure with two panels: error against number of heads, and all methods with 8 heads, by class.

    Bars go from the least to the greatest seed. The left panel has the methods of three and more numbers of heads, and the
    published curve.
    """
    from experiments.class_styles import class_style, marker
    from fairseq_lowrank.tools import pictures

    values = _by_row(lines)
    counts = Counter(name for name, _ in values)
    figure, (left, right) = pictures.grid(2, width=5.0, height=5.2)
    names = sorted((name for name in counts if counts[name] >= 3), key=lambda name: -counts[name])
    for name, style in zip(names, styles_of(lines, names), strict=True):
        heads = sorted(heads for other, heads in values if other == name)
        means, spread = _spread([values[name, count] for count in heads])
        left.errorbar(heads, means, spread, label=name, marker=marker(style), ms=5, capsize=2, **style)
    heads = [64 // rank for rank in PUBLISHED]
    left.plot(heads, PUBLISHED.values(), "k--", lw=1, label="published, d 64")
    left.set_xscale("log", base=2)
    left.set_xticks(heads, map(str, heads))
    left.set(
        xlabel="heads of size d / heads",
        ylabel=f"{METRIC} (less is better)",
        ylim=(0, 1),
        title="More heads, smaller heads",
    )
    pictures.add_legend(left, loc="lower right", fontsize=8)
    compared = sorted(
        (name for name, count in values if count == 8), key=lambda name: -statistics.fmean(values[name, 8])
    )
    for place, name in enumerate(compared):
        (mean,), spread = _spread([values[name, 8]])
        style = class_style(kind_of(name)) | {"linestyle": ""}
        right.errorbar(mean, place, xerr=spread, ms=6, capsize=2, **style)
        at = (max(values[name, 8]), place)
        right.annotate(f"{mean:.3f}", at, xytext=(7, 0), textcoords="offset points", va="center", fontsize=8)
    right.set_yticks(range(len(compared)), compared, fontsize=8)
    right.invert_yaxis()
    right.set(xlabel=f"{METRIC} (less is better)", xlim=(0, 1.08), title="8 heads, all methods")
    for kind in dict.fromkeys(map(kind_of, compared)):
        right.plot([], [], label=CLASSES[kind], **class_style(kind) | {"linestyle": ""})
    if compared:
        pictures.add_legend(right, loc="center", fontsize=8)
    return figure


def _spread(rows: list[list[float]]) -> tuple[list[float], tuple[list[float], list[float]]]:
    """Return the means of rows, and their distances to the least and the greatest value."""
    means = [statistics.fmean(row) for row in rows]
    low = [mean - min(row) for mean, row in zip(means, rows, strict=True)]
    return means, (low, [max(row) - mean for mean, row in zip(means, rows, strict=True)])
