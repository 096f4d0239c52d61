"""Learning curves of the runs in a report."""

from __future__ import annotations

import numpy

from experiments.papers.comparison import plot_name
from experiments.papers.values import canonical_row, split_row
from fairseq_lowrank.parts import PLAIN

# Tables with more rows than this get a plot for each setting.
MOST_ROWS = 9


def by_plot(tables: list[dict]) -> dict[str, list[dict]]:
    """Collect learning curves by plot: one plot for every task of a table that has curves.

    Returns:
        By the plot's name, lists of `{"row", "label", "seed", "attention", "settings", "points"}`. Runs with a single point are left
        out.
    """
    plots: dict[str, list[dict]] = {}
    for table in tables:
        for row in table["rows"]:
            for curve in row["ours"]["curves"] if row["ours"] else ():
                own = plots.setdefault(plot_name(table, curve["task"]), [])
                about = {"row": row["row"], "label": row["label"]}
                about |= {key: row["ours"][key] for key in ("attention", "settings")}
                own.append({**about, "seed": curve["seed"], "points": curve["points"]})
    return {name: found for name, runs in plots.items() if (found := [run for run in runs if is_curve(run)])}


def is_curve(run: dict) -> bool:
    """Return True if a run has two points of a loss."""
    return any(len(points_of(run, loss)[0]) > 1 for loss in ("train_loss", "valid_loss"))


def plot_curves(curves: list[dict], title: str):
    """Return a figure of loss against updates and, below it, of each row's validation loss minus its baseline's.

    A line is the mean over a row's seeds, and its band goes from the least to the greatest. The baseline of a run is the `mha`
    run of the same sizes and seed, or the first `mha` run of these sizes. A
    table of many rows gets a pair of plots for each setting, whose rows differ only in attention.
    """
    from fairseq_lowrank.tools import pictures

    rows: dict[str, list[dict]] = {}
    for curve in curves:
        rows.setdefault(curve["row"], []).append(curve)
    compared = any(baseline_of(curve, curves) is not None for curve in curves)
    groups = by_settings(rows) if compared and len(rows) > MOST_ROWS else [list(rows)]
    across = 3 if len(groups) == 1 else 1  # entries of a legend side by side
    longest = -(-max(map(len, groups)) // across)
    figure, columns = panels(len(groups), [3.4, 2.4] if compared else [3.4], below=0.17 * longest)
    about = "validation (lines: means, bands: all seeds), training (thin dots)"
    figure.suptitle(pictures.plain(f"{title}: {about}"), fontsize=10)
    for group, (losses, *differences) in zip(groups, columns, strict=True):
        first = [rows[row][0] for row in group]
        styles = pictures.styles(pictures.kind_of_flags(run["attention"]) for run in first)
        for row, style in zip(group, styles, strict=True):
            runs = rows[row]
            updates, means, _, _ = over_seeds([points_of(run, "train_loss") for run in runs])
            losses.plot(updates, means, ":", color=style["color"], linewidth=0.8)
            seeds = f" ({len(runs)} seeds)" if len(runs) > 1 else ""
            label = pictures.plain(f"{runs[0]['label']}{seeds}")
            _band(losses, over_seeds([validation(run) for run in runs]), style, label)
            found = [(run, baseline) for run in runs if (baseline := baseline_of(run, curves)) is not None]
            if found:
                _band(differences[0], over_seeds([difference_to_baseline(*pair) for pair in found]), style)
        losses.set(ylabel="loss (base 2)")
        lowest = losses
        for axes in differences:
            if not axes.lines:  # rows without a baseline
                axes.remove()
                losses.tick_params(labelbottom=True)
                continue
            axes.axhline(0, color="0.5", linewidth=0.8)
            axes.set(ylabel="minus that of mha")
            lowest = axes
        lowest.set(xlabel="updates")
        handles, labels = losses.get_legend_handles_labels()
        options = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.22), "fontsize": 7, "handlelength": 3.5}
        pictures.add_legend(lowest, handles=handles, labels=labels, columns=across, **options)
    return figure


def panels(count: int, heights: list[float], *, below: float):
    """Return a figure of ``count`` columns of plots that share their x axis, up to three columns side by side.

    Args:
        count: number of columns.
        heights: the heights of the plots of a column, in inches.
        below: the space below a column for its legend, in inches.
    """
    from matplotlib.figure import Figure

    from fairseq_lowrank.tools import pictures

    across = min(count, 3)
    down = -(-count // across)
    size = ((7.0 if count == 1 else 4.4) * across, 0.4 + down * (sum(heights) + 0.8 + below))
    figure = Figure(figsize=size, layout="constrained")
    found = []
    for block in figure.subfigures(down, across, squeeze=False).flat[:count]:
        shape = {"height_ratios": heights}
        plots = list(block.subplots(len(heights), 1, squeeze=False, sharex=True, gridspec_kw=shape).flat)
        for axes in plots:
            pictures.dress(axes)
        found.append(plots)
    return figure, found


def by_settings(rows: dict[str, list[dict]]) -> list[list[str]]:
    """Group rows whose runs differ only in attention. Rows without another row of their setting form the last group."""
    groups: dict[tuple, list[str]] = {}
    for row, runs in rows.items():
        groups.setdefault(tuple(sorted(runs[0]["settings"].items())), []).append(row)
    alone = [row for group in groups.values() if len(group) == 1 for row in group]
    return [group for group in groups.values() if len(group) > 1] + ([alone] if alone else [])


def _band(axes, curve: tuple[list[float], list[float], list[float], list[float]], style: dict, label: str = "") -> None:
    updates, means, low, high = curve
    axes.plot(updates, means, **style, marker=".", markersize=4, linewidth=1.2, label=label)
    axes.fill_between(updates, low, high, color=style["color"], alpha=0.15, linewidth=0)


def over_seeds(
    curves: list[tuple[list[float], list[float]]],
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return updates, means, least and greatest values of curves, at the first curve's updates that are in the range of all.

    Between its points, a curve is interpolated linearly.
    """
    curves = [curve for curve in curves if curve[0]]
    if not curves:
        return [], [], [], []
    start, end = max(updates[0] for updates, _ in curves), min(updates[-1] for updates, _ in curves)
    common = [update for update in curves[0][0] if start <= update <= end]
    values = numpy.array([numpy.interp(common, *curve) for curve in curves])
    return common, values.mean(0).tolist(), values.min(0).tolist(), values.max(0).tolist()


def validation(curve: dict) -> tuple[list[float], list[float]]:
    """Return the updates and validation losses of a curve, without missing values."""
    return points_of(curve, "valid_loss")


def points_of(curve: dict, loss: str) -> tuple[list[float], list[float]]:
    """Return the updates and losses of a curve, without missing values."""
    points = [point for point in curve["points"] if point[loss] is not None]
    return [point["updates"] for point in points], [point[loss] for point in points]


def difference_to_baseline(curve: dict, baseline: dict) -> tuple[list[float], list[float]]:
    """Return validation losses minus the baseline's (interpolated), at the curve's updates within the baseline's range."""
    updates, losses = validation(baseline)
    inside = [(x, y) for x, y in zip(*validation(curve), strict=True) if updates[0] <= x <= updates[-1]]
    return [x for x, _ in inside], [y - float(numpy.interp(x, updates, losses)) for x, y in inside]


def baseline_of(curve: dict, curves: list[dict]) -> dict | None:
    """Return the curve of the `mha` row that differs from this one only in the method, of the same seed if possible.

    If a row's name has no preset, its baseline is the `mha` row of its settings, or else plain `mha`.
    """
    if "row" not in curve or not validation(curve)[0]:
        return None
    row = canonical_row(f"{split_row(curve['row'])[0]}-{PLAIN}".strip("-"))
    if row == canonical_row(curve["row"]):
        return None
    drawn = [other for other in curves if validation(other)[0]]
    same = [other for other in drawn if canonical_row(other["row"]) == row]
    if not same and "settings" in curve:
        alike = [other for other in drawn if other["settings"] == curve["settings"]]
        same = [other for other in alike if split_row(other["row"])[1] == PLAIN]
    same = same or [other for other in drawn if canonical_row(other["row"]) == canonical_row(PLAIN)]
    return next((other for other in same if other["seed"] == curve["seed"]), same[0] if same else None)
