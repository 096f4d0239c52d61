"""Known attention matrices: which of them can one attention layer learn, at each number and size of heads?

The layer's queries and keys are n fixed positions. Its values are a content x [n, d]. The answer is y[:, s] = A_s · x[:, s]
for each slice s of the d columns. A is one random row-stochastic matrix for all columns (``shared``), or eight unrelated ones
for eight slices of d/8 columns (``own``). Rows of A are uniform on the simplex.

The layer's probabilities depend only on positions, and its output is linear in x:

    ŷ = Σ_i P̄_i x C_i,    C_i = W_V,i W_O,i

with P̄_i [n, n] the (mixed) probabilities of head i, W_V,i [d, d_v] and W_O,i [d_v, d]. If the entries of x are independent with
mean 0 and variance 1, the expected squared error has a closed form:

    E‖ŷ − y‖² = Σ_ij ⟨P̄_i, P̄_j⟩⟨C_i, C_j⟩ − 2 Σ_i Σ_s ⟨P̄_i, A_s⟩ Σ_{b in s} C_i[b, b] + Σ_s |s| ‖A_s‖²

A gate of the query's position makes each feature f of a head one of value size 1, with the pattern g_if[t] P̄_i[t, :].

The training loss is this error divided by its last term, E‖y‖². So the gradient has no noise, and nothing can be overfitted.
The output 0 has the loss 1; the uniform matrix has 1/2 for large n. Everything is computed in float64.

The full grid: d 64, n 16 and 32, 2 to 32 heads, Adam at 1e-2 on a cosine to 0, 800 updates, no biases. Positions are normal,
of full rank n (rows of norm √d on average) or of rank n/2. A seed gives the problem, which is the same for all methods and numbers
of heads, and the initial parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from experiments.controlled.runs import (
    SMALLEST,
    Log,
    Method,
    Run,
    geometric_mean,
    styles_of,
)
from experiments.representation import random_row_stochastic
from fairseq_lowrank.attention import AttentionSpec, build_attention
from fairseq_lowrank.attention.layer import MultiheadAttention
from fairseq_lowrank.methods.gated import HeadGate
from fairseq_lowrank.parts import Context

TABLE = "matrices"
METRIC = "relative squared error"
SPLIT = "expected over inputs"
ARCHITECTURE = "one attention layer, d 64"
EMBED_DIM = 64
STEPS = 800
LEARNING_RATE = 1e-2
SLICES = {"shared": 1, "own": 8}
HEADS = (2, 4, 8, 16, 32)
SEEDS = (1, 2, 3, 4, 5)

PRESET_METHODS = ("mha", "mixhead-a", "mixhead-b", "talking-heads", "gain", "mhe-mul")
"""Methods whose heads have the size d/h."""
LATER_METHODS = (
    *(Method(preset, preset) for preset in ("gated-head", "gated", "dcmha", "diff", "collaborative", "lrkv")),
    *(Method(preset, preset) for preset in ("knocking-linear", "mea")),
    Method("mfa", "mfa", {"head_dim": EMBED_DIM}),
    Method("sigsoftmax", "mha", {"activation": "sigsoftmax"}),
    Method("sigsoftmax-mixhead-a", "mixhead-a", {"activation": "sigsoftmax"}),
)
"""Methods of 2018 to 2026. The heads of ``mfa`` share one value, so they have the size d."""
FIXEDHEAD, MORE_HEADS = "fixedhead", "mha-more-heads"
"""Heads of size n, and a control of the same size: ``mha`` with h·n/d_k heads of the small size d_k = d/h."""

CONTROLS = {"gain": {"color": "#8c8c8c", "marker": "s"}, MORE_HEADS: {"color": "#bdbdbd", "marker": "^"}}
"""The styles of controls in pictures; their lines are dashed."""

NOT_LINEAR = {
    "head-embedding-add": "additive head embeddings are part of the values",
    "tensor-product": "values are products of two maps of the content",
}
"""Projections for which the error has no closed form, and why."""


def problem(length: int, rank: int, target: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return positions ``[n, d]`` of the given rank, and the matrices ``[slices, n, n]``, in float64.

    Raises:
        ValueError: the rank is above n or d.
    """
    if not 1 <= rank <= min(length, EMBED_DIM):
        raise ValueError(
            f"rank {rank}: expected 1 to {min(length, EMBED_DIM)} for {length} positions of size {EMBED_DIM}"
        )
    generator = torch.Generator().manual_seed(seed)
    matrices = random_row_stochastic(SLICES[target], length, generator=generator)
    if rank == min(length, EMBED_DIM):
        positions = torch.randn(length, EMBED_DIM, dtype=torch.float64, generator=generator)
    else:
        left = torch.randn(length, rank, dtype=torch.float64, generator=generator)
        right = torch.randn(rank, EMBED_DIM, dtype=torch.float64, generator=generator)
        positions = left @ right / rank**0.5
    return positions, matrices


def layer_map(layer: MultiheadAttention, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the linear map of a layer without biases: P̄ ``[H, n, n]``, W_V ``[H, d, d_v]`` and W_O ``[H, d_v, d]``.

    A layer with gates has H·d_v heads with d_v = 1.
    """
    embed_dim = positions.size(1)
    query = positions.unsqueeze(1)
    _, probabilities = layer(query, query, torch.zeros_like(query), need_head_weights=True)
    # The layer returns its values; here the values of unit contents.
    unit = torch.eye(embed_dim, dtype=positions.dtype).unsqueeze(1)
    _, values = layer(query, unit, unit, before_softmax=True)
    outputs = layer.out_proj.weight.t().unflatten(0, (layer.num_heads, -1))
    probabilities = probabilities.squeeze(1)
    if isinstance(layer.head_output, HeadGate):
        ones = probabilities.new_ones(1, layer.num_heads, len(positions), outputs.size(1))
        gates = layer.head_output("heads", ones, Context(query.transpose(0, 1)))[0]  # [H, n, d_v]
        probabilities = torch.einsum("htf,hts->hfts", gates, probabilities).flatten(0, 1)
        values, outputs = values.mT.flatten(0, 1).unsqueeze(-1), outputs.flatten(0, 1).unsqueeze(1)
    return probabilities, values, outputs


def relative_error(probabilities: Tensor, values: Tensor, outputs: Tensor, matrices: Tensor) -> Tensor:
    """Return E‖ŷ − y‖² / E‖y‖² over contents with independent entries of mean 0 and variance 1 (the module's formula).

    Args:
        probabilities: P̄ ``[H, n, n]``.
        values: W_V ``[H, d, d_v]``.
        outputs: W_O ``[H, d_v, d]``.
        matrices: A ``[slices, n, n]``, each for d / slices columns.
    """
    heads, embed_dim, value_dim = values.shape
    slices, columns = matrices.size(0), embed_dim // matrices.size(0)
    patterns, wanted = probabilities.flatten(1), matrices.flatten(1)
    if value_dim >= embed_dim:
        maps = (values @ outputs).flatten(1)
        products = maps @ maps.t()
    else:  # ⟨C_i, C_j⟩ = ⟨W_V,iᵀ W_V,j, W_O,i W_O,jᵀ⟩ avoids the d×d matrices C_i
        side_by_side, stacked = values.transpose(0, 1).flatten(1), outputs.flatten(0, 1)
        products = (side_by_side.t() @ side_by_side) * (stacked @ stacked.t())
        products = products.view(heads, value_dim, heads, value_dim).sum((1, 3))
    diagonals = torch.einsum("hbv,hvb->hb", values, outputs).view(heads, slices, columns).sum(-1)
    size = columns * wanted.square().sum()
    error = ((patterns @ patterns.t()) * products).sum() - 2 * ((patterns @ wanted.t()) * diagonals).sum() + size
    return error / size


def build_layer(method: Method, heads: int, seed: int) -> MultiheadAttention:
    """Build the layer of a run, initialised with its seed, in float64.

    Raises:
        ValueError: the output is not a linear map of the content.
    """
    projection = AttentionSpec.from_preset(method.preset, **method.axes).projection
    if projection in NOT_LINEAR:
        raise ValueError(
            f"{method.name}: {NOT_LINEAR[projection]}, so the output is not a linear map of the content. Choose another method."
        )
    torch.manual_seed(seed)
    return build_attention(method.preset, EMBED_DIM, heads, bias=False, **method.axes).double()


def trained(
    method: Method, heads: int, positions: Tensor, matrices: Tensor, seed: int, steps: int, log: Log
) -> MultiheadAttention:
    """Train one layer on one problem, and return it."""
    layer = build_layer(method, heads, seed)
    optimizer = torch.optim.Adam(layer.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        optimizer.zero_grad()
        error = relative_error(*layer_map(layer, positions), matrices)
        error.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            log(f"{step} {error.item():.6g}")
    return layer


def train(method: Method, heads: int, length: int, rank: int, target: str, seed: int, steps: int, log: Log) -> dict:
    """Train one layer on one problem, and return ``value``, the relative squared error at the end, and ``parameters``."""
    positions, matrices = problem(length, rank, target, seed)
    layer = trained(method, heads, positions, matrices, seed, steps, log)
    with torch.no_grad():
        error = relative_error(*layer_map(layer, positions), matrices).item()
    return {"value": error, "parameters": sum(parameter.numel() for parameter in layer.parameters())}


def methods(heads: int, length: int) -> Iterator[tuple[Method, int]]:
    """Yield every method for h heads of size d/h, and its number of heads."""
    head_dim = EMBED_DIM // heads
    for preset in PRESET_METHODS:
        yield Method(preset, preset), heads
    for method in LATER_METHODS:
        yield method, heads
    if length > head_dim:
        yield Method(FIXEDHEAD, "fixedhead", {"head_dim": length}), heads
        yield Method(MORE_HEADS, "mha", {"head_dim": head_dim}), heads * length // head_dim


def runs(seeds: Sequence[int] | None = None, *, quick: bool = False, steps: int | None = None) -> Iterator[Run]:
    """Yield every run of the grid: n 16 before 32, full rank before half, and all methods of a seed before the next one.

    Args:
        seeds: by default 1 to 5, with ``quick`` 1.
        quick: only n 16 at full rank.
        steps: number of updates. Another number than the task's makes separate rows; with fewer updates they are trials.
    """
    seeds = seeds or (SEEDS[:1] if quick else SEEDS)
    settings = [(16, 16)] if quick else [(16, 16), (32, 32), (16, 8), (32, 16)]
    for length, rank in settings:
        for seed in seeds:
            for target in SLICES:
                for heads in HEADS:
                    for method, count in methods(heads, length):
                        if method.exists():
                            yield _run(method, heads, count, length, rank, target, seed, steps)


def _run(
    method: Method, heads: int, count: int, length: int, rank: int, target: str, seed: int, steps: int | None
) -> Run:
    ranks = "" if rank == length else f"-rank{rank}"
    setting = {
        "heads": count,
        "head_dim": method.axes.get("head_dim", EMBED_DIM // heads),
        "small_head_dim": EMBED_DIM // heads,
        "length": length,
        "rank": rank,
        "target": target,
    }
    return Run(
        f"n{length}{ranks}-{target}-h{heads}-{method.name}",
        seed,
        method,
        STEPS if steps is None else steps,
        STEPS,
        setting,
        lambda seed, steps, log: train(method, count, length, rank, target, seed, steps, log),
    )


def problems(lines: list[dict]) -> dict[tuple[int, int, str], list[dict]]:
    """Group lines by (n, rank, target)."""
    groups: dict[tuple[int, int, str], list[dict]] = {}
    for line in lines:
        groups.setdefault((line["length"], line["rank"], line["target"]), []).append(line)
    return groups


def title(length: int, rank: int, target: str) -> str:
    """Return a problem in words."""
    wanted = "one matrix for all columns" if target == "shared" else "eight matrices for eight slices"
    return f"n {length}, {wanted}" + ("" if rank == length else f", positions of rank {rank}")


def plot(lines: list[dict]):
    """Return a figure of error against head size, with a plot for each problem and a curve for each method.

    Controls are dashed and grey. Bands go from the least to the greatest seed.
    """
    from matplotlib.ticker import NullLocator

    from experiments.class_styles import marker
    from fairseq_lowrank.tools import pictures

    groups = problems(lines)
    present = {line["method"] for line in lines}
    names = [
        name
        for name in (*PRESET_METHODS, FIXEDHEAD, MORE_HEADS, *(later.name for later in LATER_METHODS))
        if name in present
    ]
    columns = 4 if len(groups) > 1 else 2
    height = 3.6 + 0.2 * max(0, len(names) // columns - 4)
    figure, plots = pictures.grid(len(groups), width=4.2, height=height)
    for axes, (key, chosen) in zip(plots, groups.items(), strict=True):
        sizes = sorted({line["small_head_dim"] for line in chosen})
        for name, style in zip(names, styles_of(lines, names), strict=True):
            values: dict[int, list[float]] = {}
            for line in chosen:
                if line["method"] == name:
                    values.setdefault(line["small_head_dim"], []).append(line["value"])
            own = sorted(values)
            style = {"marker": marker(style), **style}
            style |= {**CONTROLS[name], "linestyle": "--"} if name in CONTROLS else {}
            axes.plot(own, [geometric_mean(values[size]) for size in own], ms=4, label=name, **style)
            low, high = ([max(SMALLEST, end(values[size])) for size in own] for end in (min, max))
            axes.fill_between(own, low, high, color=style["color"], alpha=0.2, linewidth=0)
        axes.axvline(key[0] - 1, color="0.6", linewidth=1, linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel="heads × size of mha; dotted: n − 1", ylabel=METRIC)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(sizes, labels=[f"{EMBED_DIM // size}×{size}" for size in sizes])
        axes.set_title(title(*key), fontsize=9)
    handles = {line.get_label(): line for axes in plots for line in axes.get_lines() if line.get_label() in names}
    shown = [handles[name] for name in names]
    pictures.add_legend(
        figure, handles=shown, loc="outside lower center", columns=columns, fontsize=8, handlelength=3.5
    )
    return figure
