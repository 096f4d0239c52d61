"""Layouts of figures for papers.

First columns of plots, then :func:`fit`: the width of a column or a page, broken lines, narrow legends and the height that they need.
"""

from __future__ import annotations

import itertools
import math
import textwrap
import warnings
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator
from matplotlib.transforms import BboxBase

from fairseq_lowrank.tools.pictures import LEGENDS, add_legend, dress


def panels(
    count: int, heights: list[float], *, below: float, width: float = 7.0, page: float | None = None
) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure of ``count`` columns of plots that share their x axis, up to three columns side by side.

    Args:
        count: number of columns.
        heights: the heights of the plots of a column, in inches.
        below: the space below a column for its legend, in inches.
        width: the width of a single column, in inches.
        page: the width that the figure will get: fewer columns are side by side on a narrow page.
    """
    across = min(count, 3 if page is None else max(1, int(page / 2.8)))
    down = math.ceil(count / across)
    width = width if count == 1 else 4.4
    size = (width * across, 0.4 + down * (sum(heights) + 0.8 + below))
    figure = Figure(figsize=size, layout="constrained")
    found = []
    for block in figure.subfigures(down, across, squeeze=False).flat[:count]:
        shape = {"height_ratios": heights}
        plots = list(block.subplots(len(heights), 1, squeeze=False, sharex=True, gridspec_kw=shape).flat)
        for axes in plots:
            dress(axes)
        found.append(plots)
    return figure, found


def asides(count: int) -> list[float]:
    """Return `count` positions next to each other within ± 0.5, the first in the middle."""
    return [(-1) ** place * ((place + 1) // 2) / count for place in range(count)]


# The greatest part of a figure that a legend may take.
LEGEND_SHARE = 1 / 3
# The smallest size of text in points, and the least height of a plot in inches.
LEAST_FONT, LEAST_HEIGHT = 5.0, 0.8
# The least width of a plot in a grid, in inches and as a share of the width that it was made for.
LEAST_WIDTH, LEAST_SHARE = 1.6, 0.35


def fit(figure: Figure, width: float | None = None) -> None:
    """Make a figure `width` inches wide, break long lines of text, and let the figure grow until everything is in it.

    After this no text leaves the figure, and no legend takes more than a third of it.
    """
    if width is not None:
        _set_width(figure, width)
    for _ in range(8):
        with warnings.catch_warnings():
            # a layout without room, which the next step changes
            warnings.filterwarnings("ignore", message="constrained_layout not applied")
            figure.draw_without_rendering()
        if not (_break_lines(figure) or _narrow_legends(figure) or _turn_labels(figure) or _grow(figure)):
            break
    for axes in figure.axes:
        for image in axes.images:
            left, right, *_ = image.get_extent()
            cell = axes.get_window_extent().width / abs(right - left)
            if any(text.get_window_extent().width > 0.97 * cell for text in axes.texts):
                for text in axes.texts:
                    text.set_visible(False)


def _set_width(figure: Figure, width: float) -> None:
    before, height = figure.get_size_inches()
    scale = min(1.0, max(0.7, width / before))
    grew = _use_fewer_columns(figure, width)
    shrink = width / before if grew > 1 else min(1.0, max(0.6, width / before))
    figure.set_size_inches(width, height * grew * shrink)
    for text in figure.findobj(Text):
        text.set_fontsize(max(LEAST_FONT, scale * text.get_fontsize()))
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if labels := axis.get_ticklabels():
                axis.set_tick_params(labelsize=labels[0].get_fontsize())
    for legend in [legend for legend in figure.findobj(Legend) if legend in LEGENDS]:
        owner, columns, options = LEGENDS.pop(legend)
        size = max(LEAST_FONT, scale * options.get("fontsize", 8))
        _remake(legend, owner, columns, options | {"fontsize": size})


def _use_fewer_columns(figure: Figure, width: float) -> float:
    """Arrange a grid of plots in columns of the least width, and return by how much the number of rows grew."""
    plots = [axes for axes in figure.axes if axes.get_subplotspec()]
    grids = {axes.get_gridspec() for axes in plots}
    grid = grids.pop() if len(grids) == 1 and not figure.subfigs else None
    if grid is None:
        return 1.0
    columns = max(1, int(width / max(LEAST_WIDTH, LEAST_SHARE * figure.get_figwidth() / grid.ncols)))
    if columns >= grid.ncols:
        return 1.0
    rows = math.ceil(len(plots) / columns)
    new = figure.add_gridspec(rows, columns)
    for number, axes in enumerate(plots):
        axes.set_subplotspec(new[number // columns, number % columns])
    return rows / grid.nrows * grid.ncols / columns


def _part(artist: Artist) -> BboxBase:
    """Return the box of the figure, or part of a figure, with an artist."""
    part = artist.get_figure(root=False)
    assert part is not None
    return part.get_window_extent()


def _titles(figure: Figure) -> list[tuple[Text, float]]:
    """Return texts in one direction of reading, with the length in pixels that each may have."""
    found: list[tuple[Text, float]] = []
    for part in (figure, *figure.subfigs):
        whole = part.get_window_extent()
        found += [(text, whole.height if text.get_rotation() == 90 else whole.width) for text in part.texts]
    for axes in figure.axes:
        box = _part(axes)
        place = axes.get_subplotspec()
        columns, rows = (place.get_gridspec().ncols, place.get_gridspec().nrows) if place else (1, 1)
        # a plot is not in the middle of its column: labels of the y axis move it to the right
        across = 0.85 * box.width / columns
        found += [(axes.title, across), (axes.xaxis.label, across)]
        found.append((axes.yaxis.label, box.height / rows if place else box.height))
    return found


def _break_lines(figure: Figure) -> bool:
    """Break texts that are too long, and return True if there was one."""
    changed = False
    for text, room in _titles(figure):
        box = text.get_window_extent()
        length = box.height if text.get_rotation() == 90 else box.width
        if text.get_text() and length > 0.97 * room and (broken := _broken(text.get_text(), 0.93 * room / length)):
            text.set_text(broken)
            changed = True
    for axes in figure.axes:
        labels = axes.get_yticklabels()
        widest = max((label.get_window_extent().width for label in labels), default=0)
        room = 0.5 * _part(axes).width
        if widest > room and isinstance(axes.yaxis.get_major_locator(), FixedLocator):
            names = [label.get_text() for label in labels]
            longest = max(len(line) for name in names for line in name.split("\n"))
            shorter = [_broken(name, 1.0, int(longest * room / widest)) or name for name in names]
            if shorter != names:
                axes.set_yticks(axes.get_yticks(), shorter, fontsize=labels[0].get_fontsize())
                changed = True
    return changed


def _broken(text: str, share: float, length: int | None = None) -> str | None:
    """Return text in lines of at most this share of its longest line, or of this length; None if it has no place to break."""
    lines = text.split("\n")
    length = max(8, length or int(share * max(map(len, lines))))
    broken = "\n".join(textwrap.fill(line, length, break_long_words=False) for line in lines)
    return broken if broken != text else None


def _narrow_legends(figure: Figure) -> bool:
    """Give legends that are wider than the figure fewer columns or shorter lines, and return True if there was one."""
    changed = False
    for legend in [legend for legend in figure.findobj(Legend) if legend in LEGENDS]:
        owner, columns, options = LEGENDS[legend]
        if isinstance(owner, Axes) and "bbox_to_anchor" not in options and _is_large(legend, owner):
            _remake(legend, figure, columns, options | {"loc": "outside lower center"})
            changed = True
            continue
        box, room = legend.get_window_extent(), 0.97 * _part(owner).width
        if box.width <= room:
            continue
        if columns > 1:
            _remake(legend, owner, columns - 1, options)
            changed = True
            continue
        texts = legend.get_texts()
        widest = max(text.get_window_extent().width for text in texts)
        length = max(len(line) for text in texts for line in text.get_text().split("\n"))
        length = int(length * max(0.2, (widest - (box.width - room)) / widest))
        for text in texts:
            if broken := _broken(text.get_text(), 1.0, length):
                text.set_text(broken)
                changed = True
    return changed


def _is_large(legend: Legend, axes: Axes) -> bool:
    """Return True if a legend within a plot is wider than half of the plot's share of the figure."""
    place = axes.get_subplotspec()
    columns = place.get_gridspec().ncols if place else 1
    return legend.get_window_extent().width > 0.5 * _part(axes).width / columns


def _remake(legend: Legend, owner: Axes | Figure, columns: int, options: dict[str, Any]) -> None:
    handles, labels = legend.legend_handles, [text.get_text() for text in legend.get_texts()]
    legend.remove()
    add_legend(owner, columns=columns, **options | {"handles": handles, "labels": labels})


def _turn_labels(figure: Figure) -> bool:
    """Turn the labels of x axes on which labels overlap, and return True if there was one."""
    changed = False
    for axes in figure.axes:
        labels = [label for label in axes.get_xticklabels() if label.get_text()]
        boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.x0)
        if any(one.x1 > other.x0 for one, other in itertools.pairwise(boxes)) and not labels[0].get_rotation():
            axes.tick_params(axis="x", labelrotation=90)
            changed = True
    return changed


def _grow(figure: Figure) -> bool:
    """Make a figure higher if something leaves it, a legend takes too much of it or a plot is flat; return True then."""
    width, height = figure.get_size_inches()
    wanted = height
    box = figure.get_tightbbox()
    if box.y0 < -0.01 or box.y1 > height + 0.01:
        wanted = max(wanted, 1.05 * box.height)
    for legend in figure.findobj(Legend):
        extent = legend.get_window_extent()
        share = extent.width * extent.height / (figure.bbox.width * figure.bbox.height)
        if share > 0.95 * LEGEND_SHARE:
            wanted = max(wanted, 1.05 * height * share / (0.95 * LEGEND_SHARE))
    for axes in figure.axes:
        flat = axes.get_window_extent().height / figure.dpi
        labels = [label.get_window_extent().height / figure.dpi for label in axes.get_yticklabels()]
        needed = max(LEAST_HEIGHT, 1.05 * sum(labels)) if axes.get_subplotspec() else 0.0
        if flat < needed and axes.get_aspect() == "auto":
            wanted = max(wanted, height + needed - flat)
    if wanted <= height:
        return False
    figure.set_size_inches(width, wanted)
    return True
