"""The figure of a measurement: loss against rank."""

from __future__ import annotations

from collections.abc import Sequence

from fairseq_lowrank.tools.measuring.verdict import NONE

LINES = {"encoder": "-", "decoder": "--", "cross": ":"}


def plot_cuts(results: Sequence[dict]):
    """Return a figure of the loss against the rank of the scores: a thin line for each layer, a thick one for all layers.

    A dashed line is that of a basis for each sequence alone. A point marks the need with its interval if there is a verdict, and a
    vertical line the head size. Models with different metrics are compared by cost in percent. A layer's line shows the loss of all held-out sequences,
    changed by the layer's cost on its few sequences.
    """
    from matplotlib import colormaps

    from fairseq_lowrank.tools import pictures

    in_percent = len({result["metric"] for result in results}) > 1
    figure, axes = pictures.new_figure(7.4, 4.6)
    maps = ("Blues", "Oranges", "Greens", "Purples")
    ticks: set[int] = set()

    def points(curve: dict, result: dict) -> tuple[list[int], list[float]]:
        sign = 1 if result["less_is_better"] else -1
        costs = [entry["cost"] for entry in curve["ranks"]]
        ranks = [entry["rank"] for entry in curve["ranks"]]
        ticks.update(
            rank
            for rank in ranks
            if rank & (rank - 1) == 0  # 0 and powers of two
            or rank == curve["size"]
        )
        worth = result["cuts"]["scores"]["all"]["worth"]
        return ranks, [100 * cost if in_percent else result["value"] + sign * cost * worth for cost in costs]

    for result, name in zip(results, maps * len(results), strict=False):
        shades, scores = colormaps[name], result["cuts"]["scores"]
        layers = scores.get("layers", ())
        counts = {site: sum(one["site"] == site for one in layers) for site in LINES}
        for one in layers:
            depth = (one["layer"] + 1) / max(1, counts[one["site"]])
            label = None
            if one["layer"] == counts[one["site"]] - 1:
                label = f"{pictures.plain(result['label'])}: {one['site']} layers 0 to {one['layer']}, light to dark"
            axes.plot(
                *points(one, result), LINES[one["site"]], color=shades(0.25 + 0.5 * depth), linewidth=1, label=label
            )
        curve, dark = scores["all"], shades(0.95)
        ranks, values = points(curve, result)
        axes.plot(
            ranks, values, color=dark, linewidth=3, label=f"{pictures.plain(result['label'])}: all layers", zorder=4
        )
        own = points(result["cuts"]["own"]["all"], result)
        axes.plot(*own, "--", color=dark, linewidth=2, label="all layers, a basis for each sequence", zorder=4)
        if result["verdicts"][0]["verdict"] != NONE:
            at = values[ranks.index(curve["need"])]
            low, high = curve["interval"]
            bars = [[max(0, curve["need"] - low)], [max(0, high - curve["need"])]]
            axes.errorbar(
                [curve["need"]],
                [at],
                xerr=bars,
                fmt="o",
                color=dark,
                markersize=8,
                markerfacecolor="white",
                capsize=4,
                zorder=5,
                label=f"need: rank {curve['need']} of {curve['size']} costs at most {100 * result['tolerance']:g} % of the worth",
            )
        for size in sorted({layer["head_size"] for layer in result["layers"]}):
            ticks.add(size)
            axes.axvline(size, color=dark, linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
            axes.annotate(
                f"head size {size}",
                (size, 0.62),
                xycoords=("data", "axes fraction"),
                rotation=90,
                color=dark,
                fontsize=9,
                ha="right",
                va="center",
                xytext=(-3, 0),
                textcoords="offset points",
            )
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
