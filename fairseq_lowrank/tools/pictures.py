"""One look for all pictures, drawn without a display."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

# A method has one colour in all pictures.
COLOURS = {
    "stock": "#7f7f7f",
    "mha": "#1f77b4",
    "sigsoftmax": "#17becf",
    "fixedhead": "#8c564b",
    "mixhead-a": "#ff7f0e",
    "mixhead-b": "#d62728",
    "mixhead-random": "#e8b04a",
    "avghead": "#ff9896",
    "gain": "#bcbd22",
    "talking-heads": "#e377c2",
    "mhe-add": "#98df8a",
    "mhe-mul": "#2ca02c",
    "sha": "#c5b0d5",
    "mqa": "#9467bd",
    "gqa": "#6b3fa0",
    "skv": "#9edae5",
    "el": "#393b79",
}
# What no method of these names gets, in turn.
OTHER_COLOURS = ("#111111", "#5254a3", "#637939", "#8c6d31", "#843c39", "#7b4173")
LINE_STYLES = ("-", "--", "-.", (0, (1, 1)), (0, (6, 1, 1, 1, 1, 1)), (0, (3, 3)))


def method(name: str) -> str | None:
    """The method that a row, label or path names: ``mixhead-a`` of ``h32-mixhead-a`` or ``Mixhead A, seed 1``."""
    words = "-".join(re.findall(r"[a-z0-9]+", name.lower()))
    named = [known for known in COLOURS if f"-{known}-" in f"-{words}-"]
    return max((known for known in named if known != "sigsoftmax"), key=len, default=named[0] if named else None)


def styles(names: Iterable[str]) -> list[dict]:
    """Colour and line style for each name: the colour of its method, another style where a method comes again, and a lighter
    shade where all styles have been used.
    """
    found, seen, unknown = [], Counter(), {}
    for name in names:
        known = method(name)
        if known is None:
            colour = unknown.setdefault(name, OTHER_COLOURS[len(unknown) % len(OTHER_COLOURS)])
        else:
            colour = COLOURS[known]
        rounds, style = divmod(seen[colour], len(LINE_STYLES))
        found.append({"color": _lighter(colour, 0.6**rounds), "linestyle": LINE_STYLES[style]})
        seen[colour] += 1
    return found


def _lighter(colour: str, share: float) -> str:
    """A colour of which only a share is left, the rest white."""
    return to_hex([1 - share * (1 - part) for part in to_rgb(colour)])


def plain(text: str) -> str:
    """Text that matplotlib shows as it is, not as a formula."""
    return text.replace("$", r"\$")


def number(value: float) -> str:
    """Two decimals, without a minus before zero."""
    text = f"{value:.2f}"
    return "0.00" if text == "-0.00" else text


def file_names(kind: str, names: Iterable[str]) -> dict[str, str]:
    """A file name for each picture, ``KIND-NAME`` in letters, digits, dots, dashes and underscores that are all different."""
    found: dict[str, str] = {}
    for name in names:
        stem = f"{kind}-{re.sub(r'[^A-Za-z0-9._-]+', '_', name)[:80]}"
        taken = {file.lower() for file in found.values()}
        numbered = (f"{stem}-{count}" if count > 1 else stem for count in range(1, len(found) + 2))
        found[name] = next(file for file in numbered if file.lower() not in taken)
    return found


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
        _dress(axes)
    return figure, plots[:count]


def column(heights: list[float], *, width: float = 7.0) -> tuple[Figure, list[Axes]]:
    """A figure of plots below each other that share their x axis, each as high as said, in inches."""
    figure = Figure(figsize=(width, 1.2 + sum(heights)), layout="constrained")
    shape = {"height_ratios": heights}
    plots = list(figure.subplots(len(heights), 1, squeeze=False, sharex=True, gridspec_kw=shape).flat)
    for axes in plots:
        _dress(axes)
    return figure, plots


def _dress(axes: Axes) -> None:
    axes.grid(True, color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name`.png and `name`.pdf into the folder and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for suffix in ("png", "pdf")]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths
