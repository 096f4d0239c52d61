"""Colours, markers and line styles of figures that show classes of methods."""

from __future__ import annotations

from fairseq_lowrank.tools.pictures import CLASS_STYLES, LINE_STYLES

MARKERS = "osD^vP"  # one for each line style, for points without a line
CLASS_COLOURS = ("#0072b2", "#8c8c8c", "#e69f00", "#a0c0e0", "#6000c0", "#00c878")
"""The colours of classes, in the order of :data:`~fairseq_lowrank.tools.pictures.CLASS_STYLES`; plain attention has the first one."""


def class_style(kind: str | None) -> dict:
    """Return the colour, marker and line style of a class of methods, for figures that show classes instead of methods.

    Args:
        kind: a class of :data:`CLASS_STYLES`; ``None`` for plain attention.
    """
    place = CLASS_STYLES.get(kind or "", 0)
    return {"color": CLASS_COLOURS[place], "linestyle": LINE_STYLES[place], "marker": MARKERS[place]}


def marker(style: dict) -> str:
    """Return the marker for a line style of :func:`~fairseq_lowrank.tools.pictures.styles`."""
    return MARKERS[LINE_STYLES.index(style["linestyle"])]
