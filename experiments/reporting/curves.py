"""Learning curves of the runs in a report, and of training logs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy

from experiments.recipes.logs import read_training_log
from experiments.reporting.comparison import plot_name
from fairseq_lowrank.tools.papers import canonical_row, split_row


def with_logs(tables: list[dict], logs: Iterable[Path]) -> dict[str, list[dict]]:
    """Learning curves by plot: one for every table that carries curves, or every task in it, and one for the logs given.

    Args:
        logs: files that fairseq-train wrote, or folders with files named `train.log`.

    Returns:
        Lists of `{"label", "points"}`, and `row` and `seed` of a table's runs, by the plot's name.
    """
    plots = {}
    for table in tables:
        for row in table["rows"]:
            for curve in row["ours"]["curves"] if row["ours"] else ():
                seeds = len(row["ours"]["seeds"])
                label = f"{row['label']}, seed {curve['seed']}" if seeds > 1 else row["label"]
                own = plots.setdefault(plot_name(table, curve["task"]), [])
                own.append({"row": row["row"], "label": label, "seed": curve["seed"], "points": curve["points"]})
    files = [file for path in logs for file in (sorted(path.rglob("train.log")) if path.is_dir() else [path])]
    if logs and not files:
        raise ValueError(f"no train.log in {', '.join(map(str, logs))}")
    if files:
        plots["logs"] = [
            {
                "label": file.parent.name if file.name == "train.log" else file.stem,
                "points": read_training_log(file)["epochs"],
            }
            for file in files
        ]
    return plots


def draw(curves: list[dict], title: str):
    """Loss against updates, and below it each run's validation loss less its baseline's, as a matplotlib figure.

    The baseline of a run is the `mha` run of the same sizes and seed, or the first of such; without one, as for logs,
    there are no differences.
    """
    from fairseq_lowrank.tools import pictures

    compared = [(curve, baseline) for curve in curves if (baseline := baseline_of(curve, curves)) is not None]
    heights = [3, 2] if compared else [3]
    figure, plots = pictures.column(heights)
    styles = pictures.styles(curve.get("row", curve["label"]) for curve in curves)
    for curve, style in zip(curves, styles, strict=True):
        updates = [point["updates"] for point in curve["points"]]
        training = [point["train_loss"] for point in curve["points"]]
        plots[0].plot(updates, training, ":", color=style["color"], linewidth=0.8)
        plots[0].plot(*validation(curve), **style, marker=".", label=pictures.plain(curve["label"]))
    plots[0].set(ylabel="loss (base 2)", title=pictures.plain(f"{title}: validation (lines), training (thin dots)"))
    plots[0].legend(fontsize=8)
    if compared:
        for curve, baseline in compared:
            style = styles[curves.index(curve)]
            plots[1].plot(*difference(curve, baseline), **style, marker=".")
        names = dict.fromkeys(baseline["label"] for _, baseline in compared)
        plots[1].axhline(0, color="0.5", linewidth=0.8)
        plots[1].set(ylabel="less its baseline's")
        plots[1].set_title(pictures.plain(f"Validation loss less that of {' or '.join(names)}"), fontsize=10)
    plots[-1].set(xlabel="updates")
    return figure


def validation(curve: dict) -> tuple[list[float], list[float]]:
    """Updates and validation losses of a curve, where there are any."""
    points = [point for point in curve["points"] if point["valid_loss"] is not None]
    return [point["updates"] for point in points], [point["valid_loss"] for point in points]


def difference(curve: dict, baseline: dict) -> tuple[list[float], list[float]]:
    """Validation losses less the baseline's, at the curve's updates within the baseline's; straight lines between points."""
    updates, losses = validation(baseline)
    inside = [(x, y) for x, y in zip(*validation(curve), strict=True) if updates[0] <= x <= updates[-1]]
    return [x for x, _ in inside], [y - float(numpy.interp(x, updates, losses)) for x, y in inside]


def baseline_of(curve: dict, curves: list[dict]) -> dict | None:
    """The curve of the `mha` row that differs from this one's in the method alone, of the same seed where it can be."""
    if "row" not in curve or not validation(curve)[0]:
        return None
    row = canonical_row(f"{split_row(curve['row'])[0]}-mha".strip("-"))
    if row == canonical_row(curve["row"]):
        return None
    same = [other for other in curves if canonical_row(other["row"]) == row and validation(other)[0]]
    # a row of no method's name, such as stock, stands against plain mha
    same = same or [other for other in curves if canonical_row(other["row"]) == ("mha",) and validation(other)[0]]
    return next((other for other in same if other["seed"] == curve["seed"]), same[0] if same else None)
