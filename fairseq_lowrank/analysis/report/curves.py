"""Learning curves of the runs in a report, and of training logs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fairseq_lowrank.data.results import read_training_log


def with_logs(tables: list[dict], logs: Iterable[Path]) -> dict[str, list[dict]]:
    """Learning curves by plot: one plot for every table that carries curves, and one for the logs given.

    Args:
        logs: files that fairseq-train wrote, or folders with files named `train.log`.

    Returns:
        Lists of `{"label", "points"}` by the plot's name.
    """
    plots = {}
    for table in tables:
        curves = [
            {"label": f"{row['label']}, seed {curve['seed']}" if len(ours["seeds"]) > 1 else row["label"], **curve}
            for row in table["rows"]
            if (ours := row["ours"])
            for curve in ours["curves"]
        ]
        if curves:
            plots[f"{table['paper']}-{table['table']}"] = curves
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
    """Validation loss (training loss dotted) against updates, as a matplotlib figure."""
    from fairseq_lowrank.analysis import pictures

    figure, axes = pictures.new_figure()
    for number, curve in enumerate(curves):
        updates = [point["updates"] for point in curve["points"]]
        color = f"C{number % 10}"
        axes.plot(updates, [point["train_loss"] for point in curve["points"]], ":", color=color, linewidth=1)
        valid = [
            (point["updates"], point["valid_loss"]) for point in curve["points"] if point["valid_loss"] is not None
        ]
        axes.plot(*zip(*valid, strict=True) if valid else ([], []), "-", color=color, marker=".", label=curve["label"])
    axes.set(xlabel="updates", ylabel="loss (base 2): line validation, dots training", title=title)
    axes.legend(fontsize=8)
    return figure
