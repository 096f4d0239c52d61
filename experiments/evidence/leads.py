"""Compute by how much each method leads plain attention in translation, with t intervals, and draw it.

The lead is the training loss of `mha` minus that of the row, in bits per token, within each seed (Multi30k, 786 updates at 2e-3).
"""

from matplotlib.figure import Figure

from experiments.class_styles import class_style
from experiments.evidence.lines import differences, values
from fairseq_lowrank.records.statistics import student
from fairseq_lowrank.tools import pictures

ROWS = {  # the end of a row's name in the table fast-start, and its label
    "mixhead-a": "mixhead-a",
    "mixhead-a-x2": "mixhead-a, M at 2 times the rate",
    "gain": "one factor per head (gain)",
    "gain-x{heads}": "gain at h times the rate",
    "gain-x{twice}": "gain at 2h times the rate",
    "common-mode": "common mode",
    "column-sums": "column sums",
    "small-start": "half-scale start",
    "gated-head": "one gate per head",
}
NGRAMS = {3: 2.857, 4: 2.352, 5: 2.041}
"""Bits per symbol on the test set by order, as `examples/brown/ngram.py` prints them."""


def leads(heads: int) -> dict[str, list[float]]:
    """Return the lead over `mha` of each row that was run with this number of heads, by seed from 1 on."""
    rows = {label: f"h{heads}-{name.format(heads=heads, twice=2 * heads)}-2e-3" for name, label in ROWS.items()}
    return {
        label: differences([f"h{heads}-mha-2e-3", row], table="fast-start", split="fit")
        for label, row in rows.items()
        if values("fast-start", row)
    }


def markdown() -> str:
    """Return a table of the leads with 4 and with 32 heads."""
    lines = ["| row | 4 heads of 32 | 32 heads of 4 |", "| --- | --- | --- |"]
    columns = [leads(4), leads(32)]
    for label in ROWS.values():
        if any(label in column for column in columns):
            cells = (_cell(column[label]) if label in column else "–" for column in columns)
            lines.append(" | ".join((f"| {label}", *cells)) + " |")
    return "\n".join(lines)


def _interval(values: list[float]) -> tuple[float, float, float]:
    mean = sum(values) / len(values)
    low, high = student(values)[:2] if len(values) > 1 else (None, None)
    return mean, mean if low is None else low, mean if high is None else high


def _cell(values: list[float]) -> str:
    mean, low, high = _interval(values)
    return f"{mean:.3f} ({low:.3f} … {high:.3f})".replace("-", "−")


def figure() -> Figure:
    """Return a figure of the leads, with a panel for each number of heads. Controls are grey and dashed."""
    found = {heads: leads(heads) for heads in (4, 32)}
    labels = [label for label in ROWS.values() if any(label in one for one in found.values())]
    drawn, plots = pictures.grid(2, width=4.2, height=3.6)
    for axes, (heads, row) in zip(plots, found.items(), strict=True):
        for label, by_seed in row.items():
            mean, low, high = _interval(by_seed)
            place, style = labels.index(label), class_style("OV" if label.startswith("mixhead") else "equal")
            axes.plot([low, high], [place, place], color=style["color"], linestyle=style["linestyle"], linewidth=2)
            axes.plot(mean, place, style["marker"], color=style["color"], markersize=7)
        axes.axvline(0, color="0.6", linewidth=0.8)
        axes.set_yticks(range(len(labels)), labels if heads == 4 else [])
        axes.set(ylim=(len(labels) - 0.5, -0.5), xlim=(-0.02, 0.47), title=f"{heads} heads of {128 // heads}")
    for kind, label in (("OV", "mixing after the softmax"), ("equal", "control")):
        plots[1].plot([], [], label=label, **class_style(kind))
    drawn.supxlabel(
        "lead over mha on the training loss, bits per token (more is better): mean and 95 % t interval", fontsize=9
    )
    plots[1].legend(loc="lower left", fontsize=8)
    return drawn
