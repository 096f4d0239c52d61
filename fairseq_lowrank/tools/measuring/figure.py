"""The figures of a measurement: loss against rank, and the need of each head."""

from __future__ import annotations

from collections.abc import Sequence

from fairseq_lowrank.tools.measuring.verdict import NONE

LINES = {"encoder": "-", "decoder": "--", "cross": ":"}
MAPS = ("Blues", "Oranges", "Greens", "Purples")


def plot_cuts(results: Sequence[dict]):
    """Return a figure of the loss against the rank of the scores: a thin line for each layer, a thick one for all layers.

    A dashed line is that of a basis for each sequence alone. A point marks the need with its interval if there is a verdict, and a
    vertical line the head size. Models with different metrics are compared by cost in percent. A layer's line shows the loss of
    all held-out sequences, changed by the layer's cost on its few sequences.
    """
    from matplotlib import colormaps

    from fairseq_lowrank.tools import pictures

    in_percent = len({result["metric"] for result in results}) > 1
    figure, axes = pictures.new_figure(7.4, 4.6)
    for result, name in zip(results, MAPS * len(results), strict=False):
        plot_layers(axes, result, name, in_percent)
        plot_all(axes, result, colormaps[name](0.95), in_percent)
    curves = [curve for result in results for curve in _curves(result)]
    ticks = {layer["head_size"] for result in results for layer in result["layers"]}
    ticks |= {row["rank"] for curve in curves for row in curve["ranks"] if _is_tick(row["rank"], curve)}
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xticks(sorted(ticks), [str(rank) for rank in sorted(ticks)])
    axes.minorticks_off()
    metric = "cost, % of what attention is worth" if in_percent else results[0]["metric"]
    axes.set(xlabel="rank to which the scores are cut", ylabel=metric)
    labels = len(axes.get_legend_handles_labels()[1])
    if labels > 8:
        figure.set_figheight(figure.get_figheight() + 0.17 * labels / 2)
        pictures.add_legend(figure, loc="outside lower center", fontsize=8, columns=2)
    else:
        pictures.add_legend(axes, fontsize=8)
    return figure


def _curves(result: dict) -> list[dict]:
    scores = result["cuts"]["scores"]
    return [scores["all"], result["cuts"]["own"]["all"], *scores.get("layers", ())]


def _is_tick(rank: int, curve: dict) -> bool:
    return rank & (rank - 1) == 0 or rank == curve["size"]  # 0 and powers of two


def _points(curve: dict, result: dict, in_percent: bool) -> tuple[list[int], list[float]]:
    """Return ranks, and losses or costs in percent."""
    sign, rows = 1 if result["less_is_better"] else -1, curve["ranks"]
    losses = [100 * row["cost"] if in_percent else result["value"] + sign * row["added"] for row in rows]
    return [row["rank"] for row in rows], losses


def plot_layers(axes, result: dict, name: str, in_percent: bool) -> None:
    """Draw a thin line for each layer, light to dark."""
    from matplotlib import colormaps

    from fairseq_lowrank.tools import pictures

    layers = result["cuts"]["scores"].get("layers", ())
    for site, line in LINES.items():
        here = [one for one in layers if one["site"] == site]
        for one in here:
            label = f"{pictures.plain(result['label'])}: {site} layers 0 to {one['layer']}, light to dark"
            colour = colormaps[name](0.25 + 0.5 * (one["layer"] + 1) / len(here))
            points = _points(one, result, in_percent)
            axes.plot(*points, line, color=colour, linewidth=1, label=label if one is here[-1] else None)


def plot_all(axes, result: dict, dark, in_percent: bool) -> None:
    """Draw the lines of all layers, the need with its interval, and the head sizes."""
    from fairseq_lowrank.tools import pictures

    curve, label = result["cuts"]["scores"]["all"], f"{pictures.plain(result['label'])}: all layers"
    ranks, losses = _points(curve, result, in_percent)
    axes.plot(ranks, losses, color=dark, linewidth=3, label=label, zorder=4)
    own = _points(result["cuts"]["own"]["all"], result, in_percent)
    axes.plot(*own, "--", color=dark, linewidth=2, label="all layers, a basis for each sequence", zorder=4)
    if result["verdicts"][0]["verdict"] != NONE:
        need, (low, high) = curve["need"], curve["interval"]
        label = f"need: rank {need} of {curve['size']} costs at most {100 * result['tolerance']:g} % of the worth"
        style = {"fmt": "o", "color": dark, "markersize": 8, "markerfacecolor": "white", "capsize": 4, "zorder": 5}
        bars = [[max(0, need - low)], [max(0, high - need)]]
        axes.errorbar([need], [losses[ranks.index(need)]], xerr=bars, label=label, **style)
    for size in sorted({layer["head_size"] for layer in result["layers"]}):
        axes.axvline(size, color=dark, linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": "right", "va": "center"}
        axes.annotate(f"head size {size}", (size, 0.62), xytext=(-3, 0), rotation=90, color=dark, fontsize=9, **place)


def plot_heads(results: Sequence[dict]) -> dict:
    """Return a figure of the need of each head for each result that has them: a row for each layer, a column for each head.

    The colour is the share of the directions that a head needs. A head that does nothing alone is white with a cross.
    """
    from fairseq_lowrank.tools import pictures

    measured = {result["label"]: result for result in results if "heads" in result["cuts"]["scores"]}
    names = (
        dict(zip(measured, ["heads"], strict=False)) if len(measured) == 1 else pictures.file_names("heads", measured)
    )
    return {names[label]: plot_needs(result) for label, result in measured.items()}


def plot_needs(result: dict):
    """Return the figure of the needs of one model's heads."""
    from matplotlib import colormaps

    from fairseq_lowrank.tools import pictures

    rows: dict[tuple[str, int], list[dict]] = {}
    for head in result["cuts"]["scores"]["heads"]:
        rows.setdefault((head["site"], head["layer"]), []).append(head)
    width = max(map(len, rows.values()))
    shares = [[one["need"] / one["size"] for one in row] + [float("nan")] * (width - len(row)) for row in rows.values()]
    figure, axes = pictures.new_figure(2.6 + 0.32 * max(8, width), 1.6 + 0.22 * max(6, len(rows)))
    colours = colormaps["viridis"].copy()
    colours.set_under("white")
    image = axes.imshow(shares, cmap=colours, vmin=1e-9, vmax=1, aspect="auto", interpolation="none")
    for row, heads in enumerate(rows.values()):
        for head in heads:
            dark = 0 < head["need"] / head["size"] < 0.6
            axes.annotate(
                str(head["need"] or "×"),
                (head["head"], row),
                color="white" if dark else "black",
                fontsize=7,
                ha="center",
                va="center",
            )
    sites = {site for site, _ in rows}
    labels = [f"{site} {layer}" if len(sites) > 1 else str(layer) for site, layer in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.set_xticks(range(width))
    axes.grid(visible=False)
    layer = "layer" if len(sites) > 1 else f"{next(iter(sites))} layer"
    axes.set(
        xlabel="head", ylabel=layer, title=f"{pictures.plain(result['label'])}: directions that each head needs alone"
    )
    figure.colorbar(image, ax=axes, label="share of its directions")
    return figure
