"""Draw what heads of several sizes make of one pattern, and what Mixhead does with the patterns of a trained layer.

`figure` trains no model: queries, keys and mixing are free, so an error is what head size and mixing alone cost (15 s on one core).
`mixing_figure` reads a checkpoint, such as that of the quickstart.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

LENGTH = 32
SIZES = (2, 4, 8, 16)
HEADS, SIZE = 4, 4


def letters() -> Tensor:
    """Return the letters "LOW RNK" as ink in [0, 1], `[n, n]`."""
    figure = Figure(figsize=(1, 1), dpi=LENGTH)
    canvas = FigureCanvasAgg(figure)
    for text, height in (("LOW", 0.74), ("RNK", 0.26)):
        figure.text(0.5, height, text, ha="center", va="center", fontsize=22, weight="bold")
    canvas.draw()
    return torch.from_numpy(1 - np.asarray(canvas.buffer_rgba())[..., 0] / 255.0)


def fit(targets: Tensor, heads: int, size: int, mixed: str = "", tries: int = 2) -> tuple[float, Tensor]:
    """Fit patterns by heads of a size, with L-BFGS from several starts.

    Args:
        targets: patterns `[targets, n, n]`; without mixing one for each head.
        heads: the number of heads.
        size: the head size d_k.
        mixed: "after" or "before" the softmax, by a matrix M `[heads, targets]`; empty for heads that are not mixed.
        tries: the number of starts.

    Returns:
        ‖P̂ − P‖ / ‖P‖ over all targets, and the first pattern of the best fit.
    """
    best, found = float("inf"), targets[0]
    for seed in range(tries):
        generator = torch.Generator().manual_seed(seed)
        draw = {"dtype": torch.float64, "generator": generator}
        query, key = (torch.randn(heads, LENGTH, size, **draw).mul_(0.5).requires_grad_() for _ in range(2))
        start = torch.full((heads, 1), 1 / heads, dtype=torch.float64)
        if len(targets) > 1:
            start = torch.eye(heads, dtype=torch.float64) + 0.1 * torch.randn(heads, heads, **draw)
        mixing = start.requires_grad_()

        def patterns(query: Tensor = query, key: Tensor = key, mixing: Tensor = mixing) -> Tensor:
            scores = query @ key.mT / size**0.5
            if mixed == "before":
                scores = torch.einsum("ji,jts->its", mixing, scores)
            weights = scores.softmax(-1)
            return torch.einsum("ji,jts->its", mixing, weights) if mixed == "after" else weights

        optimizer = torch.optim.LBFGS(
            [query, key, mixing],
            max_iter=1000,
            history_size=20,
            line_search_fn="strong_wolfe",
            tolerance_change=1e-14,
        )

        def loss(patterns=patterns, optimizer=optimizer) -> Tensor:
            optimizer.zero_grad()
            value = (patterns() - targets).square().sum() / targets.square().sum()
            value.backward()
            return value

        optimizer.step(loss)
        value = loss().item()
        if value < best:
            best, found = value, patterns().detach()[0]
    return best**0.5, found


def figure() -> Figure:
    """Return a pattern as single heads of several sizes draw it, and as four heads of 4 do, with and without mixing."""
    logits = 2.5 * letters()
    four = torch.stack([logits, logits.flip(0), logits.mT, logits.mT.flip(1)]).softmax(-1)
    one = four[:1]
    need = torch.linalg.matrix_rank(logits - logits.mean(-1, keepdim=True), rtol=1e-3).item()
    shown = [(f"the pattern:\nits scores have rank {need}", None, one[0])]
    shown += [(f"one head\nof size {size}", *fit(one, 1, size)) for size in SIZES]
    for name, targets in (("ONE pattern", one), ("FOUR patterns", four)):
        for mixed, words in (
            ("", "not mixed"),
            ("after", "mixed after softmax\n(Mixhead)"),
            ("before", "mixed before softmax\n(score mixing)"),
        ):
            if mixed or targets is four:
                shown.append((f"4 heads of 4, {name}\n{words}", *fit(targets, HEADS, SIZE, mixed)))
    drawn = Figure(figsize=(11, 6), layout=ConstrainedLayoutEngine(h_pad=0.08))
    for axes, (title, error, pattern) in zip(drawn.subplots(2, 5).flat, shown, strict=True):
        draw(axes, pattern, title, cmap="magma", vmax=float(one.max()))
        axes.set_xlabel("" if error is None else f"error {100 * error:.1f} %")
    return drawn


def mixing_figure(checkpoint: Path) -> Figure:
    """Return the patterns P of the first encoder layer of a model with static mixing, its matrix M, and the mixed patterns P̄.

    The sentence is the longest of the first 40 of the test set.
    """
    from fairseq_lowrank.tools.fairseq.checkpoints import load_model

    model, task = load_model(checkpoint)
    task.load_dataset("test")
    dataset = task.dataset("test")
    source = max((dataset[index]["source"] for index in range(min(40, len(dataset)))), key=len)
    layer, seen = model.encoder.layers[0].self_attn, []
    hook = layer.register_forward_pre_hook(lambda _, args, named: seen.append(named["query"]), with_kwargs=True)
    with torch.no_grad():
        model.encoder(source[None], torch.tensor([len(source)]))
        hook.remove()
        x = seen[0]
        mixed = layer(x, x, x, need_head_weights=True)[1][:, 0]
        matrix, layer.mixing = layer.mixing.operation(x).weight.detach(), None
        plain = layer(x, x, x, need_head_weights=True)[1][:, 0]
    heads, top = len(plain), float(max(plain.max(), mixed.max()))
    drawn = Figure(figsize=(2.4 * (heads + 1), 5.4), layout="constrained")
    plots = drawn.subplots(2, heads + 1)
    for row, patterns, name in ((0, plain, "P"), (1, mixed, r"\bar{P}")):
        for head, axes in enumerate(plots[row, 1:]):
            draw(axes, patterns[head], f"${name}_{head + 1}$", cmap="Blues", vmax=top)
    words = [task.source_dictionary[index] for index in source]
    plots[1, 1].set_yticks(range(len(words)), words, fontsize=6)
    plots[0, 0].axis("off")
    plots[0, 0].text(
        0.5,
        0.5,
        "P: patterns of the heads\n\nM: learned\n\n$\\bar{P}_i = \\sum_j M_{ji} P_j$",
        ha="center",
        va="center",
    )
    limit = float(matrix.abs().max())
    draw(plots[1, 0], matrix.mT, "M (row i: head i)", cmap="RdBu", vmin=-limit, vmax=limit)
    for i in range(heads):
        for j in range(heads):
            colour = "white" if abs(matrix[j, i]) > 0.7 * limit else "black"
            plots[1, 0].text(j, i, f"{matrix[j, i]:.2f}", ha="center", va="center", fontsize=8, color=colour)
    return drawn


def draw(axes: Axes, values: Tensor, title: str, *, cmap: str, vmax: float, vmin: float = 0.0) -> None:
    """Draw a matrix as an image without ticks."""
    axes.imshow(values, cmap=cmap, vmin=vmin, vmax=vmax, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, fontsize=10)
