"""One look for all pictures, drawn without a display."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def new_figure(width: float = 7.0, height: float = 4.4) -> tuple[Figure, Axes]:
    """A figure with one plot."""
    figure, axes = grid(1, width=width, height=height)
    return figure, axes[0]


def grid(count: int, *, width: float = 3.2, height: float = 2.8) -> tuple[Figure, list[Axes]]:
    """A figure of `count` plots, each `width` × `height` inches, in one row up to four."""
    columns = count if count <= 4 else math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    plots = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in plots[count:]:
        unused.remove()
    for axes in plots[:count]:
        axes.grid(True, color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, plots[:count]


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name`.png and `name`.pdf into the folder and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for suffix in ("png", "pdf")]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths
