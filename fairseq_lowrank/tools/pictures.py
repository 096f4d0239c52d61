"""Figures in one style, drawn without a display."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from fairseq_lowrank.attention import AXES, METHODS, PRESETS, AttentionSpec
from fairseq_lowrank.files import whole_file
from fairseq_lowrank.parts import PLAIN

STOCK = "stock"
"""The name of fairseq's own attention in figures."""
# Other variants get these colours, in turn.
OTHER_COLOURS = ("#f060f0", "#600000", "#0018f0", "#a848f0", "#f0c060", "#300030")
# The location of a legend outside the plots of a figure.
OUTSIDE = "outside right upper"
LINE_STYLES = ("-", "--", "-.", (0, (1, 1)), (0, (6, 1, 1, 1, 1, 1)), (0, (3, 3)))
CLASS_STYLES = {"equal": 1, "OV": 2, "restricted": 3, "QK": 4, "patterns": 5}
"""The first line style of a method, by its class. Plain attention and methods without a class have the first one."""


def attention_kind(preset: str | None, axes: Mapping[str, object] = MappingProxyType({})) -> str:
    """Return the preset that equals a model's attention except for sizes: the key of its colour.

    Args:
        preset: the value of ``--attention``; ``None`` for fairseq's own attention.
        axes: values that override the preset, by the name of the axis.

    Returns:
        The name of a method, or :data:`STOCK`; or the preset with its overrides, if no method is equal.
    """
    if preset is None:
        return STOCK
    kinds = [name for name, axis in AXES.items() if axis.type is str]
    plain = AttentionSpec()

    def values(preset: str, axes: Mapping[str, object]) -> dict[str, object]:
        chosen = {**PRESETS.get(preset, {}), **{name: value for name, value in axes.items() if value is not None}}
        return {name: chosen.get(name, getattr(plain, name)) for name in kinds}

    found = values(preset, axes)
    for known in (preset, *METHODS):
        if found == values(PLAIN, METHODS[known].axes if known in METHODS else {}):
            return known
    own = values(preset, {})
    return ", ".join([preset, *(f"{name} {value}" for name, value in found.items() if value != own[name])])


def kind_of_flags(flags: Mapping[str, Any] | None) -> str:
    """Return the :func:`attention_kind` of ``{"preset": …, AXIS: …}``, or of ``None`` for fairseq's own attention."""
    axes: dict[str, Any] = dict(flags or {"preset": None})
    return attention_kind(axes.pop("preset"), axes)


def colour_of(kind: str) -> str | None:
    """Return the colour that a method has in all figures; ``None`` if it has none."""
    if kind == STOCK:
        return "#000000"
    return METHODS[kind].colour if kind in METHODS else None


def styles(kinds: Iterable[str]) -> list[dict]:
    """Return a colour and a line style for each model, by its attention (see :func:`attention_kind`).

    The line style is that of the method's class. If an attention repeats, it gets another line style, and a lighter shade after all
    styles are used.
    """
    found: list[dict] = []
    seen: Counter[str] = Counter()
    unknown: dict[str, str] = {}
    for kind in kinds:
        colour = colour_of(kind) or unknown.setdefault(kind, OTHER_COLOURS[len(unknown) % len(OTHER_COLOURS)])
        rounds, style = divmod(seen[colour], len(LINE_STYLES))
        first = CLASS_STYLES.get(METHODS[kind].kind or "", 0) if kind in METHODS and kind != PLAIN else 0
        line = LINE_STYLES[(first + style) % len(LINE_STYLES)]
        found.append({"color": _lighter(colour, 0.6**rounds), "linestyle": line})
        seen[colour] += 1
    return found


def _lighter(colour: str, share: float) -> str:
    """Mix a colour with white and keep this share of it."""
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(colour))
    return to_hex((red, green, blue))


def plain(text: str) -> str:
    """Return text that matplotlib shows literally, not as a formula."""
    return text.replace("$", r"\$")


def number(value: float) -> str:
    """Return a number with two decimals, without a minus before zero."""
    text = f"{value:.2f}"
    return "0.00" if text == "-0.00" else text


def file_names(kind: str, names: Iterable[str]) -> dict[str, str]:
    """Return a different file name for each picture: ``KIND-NAME`` in letters, digits, dots, dashes and underscores."""
    found: dict[str, str] = {}
    for name in names:
        stem = f"{kind}-{re.sub(r'[^A-Za-z0-9._-]+', '_', name)[:80]}"
        taken = {file.lower() for file in found.values()}
        numbered = (f"{stem}-{count}" if count > 1 else stem for count in range(1, len(found) + 2))
        found[name] = next(file for file in numbered if file.lower() not in taken)
    return found


def new_figure(width: float = 7.0, height: float = 4.4) -> tuple[Figure, Axes]:
    """Return a figure with one plot."""
    figure, axes = grid(1, width=width, height=height)
    return figure, axes[0]


def grid(count: int, *, width: float = 3.2, height: float = 2.8) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` plots, each `width` × `height` inches; up to four are in one row."""
    columns = count if count <= 4 else math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    plots = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in plots[count:]:
        unused.remove()
    for axes in plots[:count]:
        dress(axes)
    return figure, plots[:count]


def dress(axes: Axes) -> None:
    """Give axes the style of all figures."""
    axes.grid(True, color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def add_legend(owner: Axes | Figure, *, columns: int = 1, **options: Any) -> None:
    """Add a legend, below the plots if it is outside of them."""
    if isinstance(owner, Figure) and options["loc"].startswith("outside lower"):
        _name_plots(owner)
    owner.legend(ncols=columns, **options)


def _name_plots(figure: Figure) -> None:
    """Move the labels of a figure to its plots, because matplotlib draws a legend below the plots over them."""
    plots = [axes for axes in figure.axes if axes.get_subplotspec()]
    size = min((text.get_fontsize() for text in figure.texts), default=9)
    if label := figure.get_supxlabel():
        figure.supxlabel("")
        for axes in plots:
            if (place := axes.get_subplotspec()) and place.is_last_row():
                axes.set_xlabel(label, fontsize=size)
    if len(plots) == 1 and (label := figure.get_supylabel()):
        figure.supylabel("")
        plots[0].set_ylabel(label, fontsize=size)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name`.png and `name`.pdf into the folder, with all texts that leave the figure, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.draw_without_rendering()
    box = Bbox.union([Bbox.from_extents(0, 0, *figure.get_size_inches()), figure.get_tightbbox()])
    paths = [folder / f"{name}.{suffix}" for suffix in ("png", "pdf")]
    for path in paths:
        with whole_file(path, "wb") as file:
            figure.savefig(file, format=path.suffix[1:], dpi=150, bbox_inches=box)
    return paths
