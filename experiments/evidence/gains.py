"""Print what each method gains over plain attention, with t intervals, and draw it next to the small language models.

The gain is the training loss of `mha` minus that of the row, in bits per token, within each seed (Multi30k, 786 updates at
2e-3). The language models are those of the Brown corpus by bytes: loss on the test set.

    python -m experiments.evidence.gains --output docs/pictures/gains.png
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

from fairseq_lowrank.tools import pictures
from fairseq_lowrank.tools.reporting.statistics import student

RESULTS = Path(__file__).parents[2] / "results" / "evidence.jsonl"
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
LANGUAGE_MODELS = {
    "h4-mha": "4 heads of 32, 2,000 updates",
    "h32-mha": "32 heads of 4, 2,000 updates",
    "h32-mixhead-a": "… with mixhead-a",
    "h32-score-gain-x32": "… with score gain × 32",
    "h32-score-mixing": "… with score mixing",
    "h32-mha-equal-time": "… 1.6 times the updates",
    "h4-mha-6000": "4 heads of 32, 6,000 updates",
    "h32-mha-6000": "32 heads of 4, 6,000 updates",
    "h32-score-mixing-6000": "… with score mixing",
}
NGRAMS = {3: 2.857, 4: 2.352, 5: 2.041}
"""Bits per symbol on the test set by order, as `examples/brown/ngram.py` prints them."""


def losses(table: str, split: str, results: Path = RESULTS) -> dict[str, dict[int, float]]:
    """Return the bits of each row of a table by seed."""
    found = defaultdict(dict)
    for text in results.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["table"] == table and not line["smoke"]:
            found[line["row"]][line["seed"]] = line["losses"][split]["bits"]
    return found


def gains(heads: int, results: Path = RESULTS) -> dict[str, list[float]]:
    """Return the gain over `mha` of each row that was run with this number of heads, by seed from 1 on."""
    fit = losses("fast-start", "fit", results)
    mha = fit[f"h{heads}-mha-2e-3"]
    found = {}
    for name, label in ROWS.items():
        row = fit.get(f"h{heads}-{name.format(heads=heads, twice=2 * heads)}-2e-3", {})
        if row:
            found[label] = [mha[seed] - row[seed] for seed in sorted(row)]
    return found


def markdown() -> str:
    """Return a table of the gains with 4 and with 32 heads."""
    lines = ["| row | 4 heads of 32 | 32 heads of 4 |", "| --- | --- | --- |"]
    columns = [gains(4), gains(32)]
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


def draw(output: Path) -> list[Path]:
    """Draw the gains in one panel and the language models in another."""
    figure, (left, right) = pictures.grid(2, width=5.2, height=3.6)
    found = {heads: gains(heads) for heads in (4, 32)}
    labels = [label for label in ROWS.values() if any(label in one for one in found.values())]
    for heads, shift, colour in ((4, -0.17, "tab:blue"), (32, 0.17, "tab:red")):
        for label, values in found[heads].items():
            mean, low, high = _interval(values)
            place = labels.index(label) + shift
            left.plot([low, high], [place, place], color=colour)
            left.plot(mean, place, "o", color=colour, label=f"{heads} heads of {128 // heads}")
    left.set_yticks(range(len(labels)), labels)
    left.invert_yaxis()
    left.axvline(0, color="grey", linewidth=0.8)
    left.set_xlabel("gain over mha on the training loss, bits per token")
    handles, names = left.get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), frameon=False, loc="outside lower left", ncols=2)
    left.set_title("Translation: mean and 95 % t interval")

    models = losses("language-model", "test")
    rows = [row for row in LANGUAGE_MODELS if row in models]
    for place, row in enumerate(rows):
        values = list(models[row].values())
        right.plot(values, [place] * len(values), "o", color="tab:blue" if row.startswith("h4") else "tab:red")
    for order, bits in NGRAMS.items():
        right.axvline(bits, color="grey", linestyle="--", linewidth=0.8)
        right.annotate(
            f"{order}-gram",
            (bits, len(rows) - 0.4),
            ha="right" if order == min(NGRAMS) else "left",
            fontsize=8,
            color="grey",
        )
    right.set_yticks(range(len(rows)), [LANGUAGE_MODELS[row] for row in rows])
    right.set_ylim(len(rows) - 0.2, -0.6)
    right.set_xlabel("bits per symbol (test), a dot per seed")
    right.set_title("Language models by bytes")
    return pictures.save(figure, output.parent, output.stem)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the picture goes, .png")
    args = parser.parse_args()
    print(markdown())
    if args.output:
        print(*draw(args.output), sep="\n")


if __name__ == "__main__":
    main()
