"""Compare rows of results: differences paired by seed and sentence, with an interval and p-values.

Each contrast is A − B over the seeds that both rows have, or an interaction (A − B) − (C − D). For each the table shows

- the number of seeds, the mean difference, Student's 95 % interval over seeds and its p;
- this p after Holm's correction over all contrasts (a contrast without a p, as with one seed, counts as 1);
- the better side, if the interval does not contain 0;
- a 95 % interval and a p over test sentences, for these trainings, if lines have `sentence_values`, or `sentence_counts` of BLEU;
- a 95 % interval over seeds and sentences, with three seeds or more: the others cover either other seeds or other sentences;
- the number of seeds in which the difference is above 0, and the p of all choices of signs.

A line of results needs `row`, `seed`, `metric` and `value`; other fields are compared if lines have them.

  fairseq-lowrank compare results/multi30k.jsonl --pair mha mixhead-a --pair mha mixhead-b --metric sacrebleu
  fairseq-lowrank compare results/ --table matrices --logarithm --pair n16-shared-h16-mha n16-shared-h16-mixhead-a
  fairseq-lowrank compare runs.jsonl --interaction mixhead-a-h32 mha-h32 mixhead-a mha

If lines have several scores, `--metric` and `--split` choose one. `--metric bits --split valid` compares validation losses.
BLEU is not a mean over sentences, so each draw of sentences adds up their counts and computes BLEU again.
"""

import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path

from fairseq_lowrank.cli import _output
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.records import formats

NAME = "compare"
HELP = "compare rows of results, paired by seed and sentence, with p-values"
ENDINGS = {"markdown": "md", "latex": "tex"}
# Smaller p-values are not exact.
LEAST_P = 1e-12
NEITHER = "With fewer than three seeds, neither the interval (t) nor that over sentences covers both other seeds and other sentences."


def add_arguments(parser) -> None:
    parser.add_argument("results", type=Path, nargs="+", help="folders of .jsonl files, or such files")
    parser.add_argument(
        "--pair", nargs=2, action="append", default=[], metavar=("A", "B"), help="a contrast A − B; may be repeated"
    )
    parser.add_argument(
        "--interaction",
        nargs=4,
        action="append",
        default=[],
        metavar=("A", "B", "C", "D"),
        help="a contrast (A − B) − (C − D); may be repeated",
    )
    for name in ("paper", "table", "metric", "split"):
        parser.add_argument(f"--{name}", help=f"use only lines of this {name}, if rows have several")
    parser.add_argument(
        "--logarithm", action="store_true", help="compare natural logarithms, so a difference shows a ratio"
    )
    choices = ("text", *formats.FORMATS)
    parser.add_argument("--format", choices=choices, default="text", help="format of the table (default: %(default)s)")
    _output.add_output_arguments(parser, f"{NAME}.csv and .json, the contrasts as .png and .pdf")


def run(args) -> None:
    if not args.pair and not args.interaction:
        raise UserError("nothing to compare. Add --pair A B or --interaction A B C D.")

    from fairseq_lowrank.records import contrasts

    wanted = {name: value for name in ("paper", "table", "metric", "split") if (value := getattr(args, name))}
    lines = contrasts.load(args.results)
    rows = [row for asked in (*args.pair, *args.interaction) for row in asked]
    lines = contrasts.select(lines, wanted, rows)
    data = contrasts.as_rows(contrasts.compare_rows(lines, args.pair, args.interaction, logarithm=args.logarithm))
    text = as_text(data, args.format)
    pages = {f"{NAME}.{ENDINGS[args.format]}": text + "\n"} if args.format in ENDINGS else {}
    _output.show(args, data, text)
    _output.write(args, NAME, data, data, plot_figures(data) if args.output else {}, pages)


def plot_figures(data: list[dict]) -> dict:
    """Return a figure for each unit, because differences of bits and of BLEU need separate axes."""
    from fairseq_lowrank.tools import pictures

    units = list(dict.fromkeys(row["unit"] for row in data))
    names = {units[0]: NAME} if len(units) == 1 else pictures.file_names(NAME, units)
    return {file: plot_contrasts([row for row in data if row["unit"] == unit]) for unit, file in names.items()}


def verdict(row: dict) -> str:
    """Return the better side and the number of seeds of a row of :func:`~fairseq_lowrank.records.contrasts.as_rows`, in words."""
    better = f"{row['better']} {'better' if len(row['rows']) == 2 else 'by more'}" if row["better"] else None
    seeds = f"{row['seeds']} seed{'s' * (row['seeds'] > 1)}"
    return f"{better or 'neither side clearly better'}; {seeds}"


def plot_contrasts(rows: Sequence[dict]):
    """Return a figure with a line for each row of :func:`~fairseq_lowrank.records.contrasts.as_rows`.

    A thin bar is Student's 95 % interval, a broad bar the interval over sentences. The diamond is the mean, and circles are the
    seeds' means.
    """
    from fairseq_lowrank.tools import pictures

    names = ["\n".join(textwrap.fill(text, 70) for text in (row["contrast"], verdict(row))) for row in rows]
    names = [pictures.plain(name) for name in names]
    lines = sum(1 + name.count("\n") for name in names)
    figure, axes = pictures.new_figure(8.5, 1.1 + 0.12 * len(rows) + 0.17 * lines)
    for place, row in enumerate(rows):
        if row["sentences_low"] is not None:
            over = [row["sentences_low"], row["sentences_high"]]
            axes.plot(over, [place, place], "-k", linewidth=7, alpha=0.3, solid_capstyle="butt")
        if row["low"] is not None:
            axes.plot([row["low"], row["high"]], [place, place], "-k", linewidth=1.5)
        axes.plot(row["seed_means"], [place] * row["seeds"], "ok", fillstyle="none", markersize=5)
        axes.plot([row["mean"]], [place], "Dk", markersize=6)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    units = pictures.plain(", ".join(dict.fromkeys(row["unit"] for row in rows)))
    shown = "diamond: mean; circles: seeds; line: 95 % interval, t over seeds"
    shown += "; broad bar: over sentences" if any(row["sentences_low"] is not None for row in rows) else ""
    sides = {"left: A is better, right: B" if row["lower_is_better"] else "left: B is better, right: A" for row in rows}
    side = f" ({sides.pop()})" if len(sides) == 1 else ""
    figure.supxlabel(f"difference A − B in {units}{side}\n{shown}", fontsize=8)
    return figure


def heading(data: list[dict]) -> str:
    """Return a sentence for each metric: its direction, its data and its seeds."""
    found: dict[str, tuple[dict, dict]] = {}
    for row in data:
        splits, seeds = found.setdefault(row["unit"], ({}, {}))
        splits |= dict.fromkeys(row["splits"])
        seeds |= dict.fromkeys(row["seed_numbers"])
    lower = {row["unit"]: row["lower_is_better"] for row in data}
    return " ".join(
        f"Differences of {unit} ({'less' if lower[unit] else 'more'} is better)"
        + (f" on {', '.join(named)}" if (named := _named(splits)) else "")
        + f", seed{'s' * (len(seeds) > 1)} {', '.join(map(str, sorted(seeds)))}."
        for unit, (splits, seeds) in found.items()
    )


def _named(splits: Collection[str]) -> list[str]:
    """Return the names of splits; older lines do not name the corpus of a split that others name."""
    return [one for one in splits if one and not any(other.endswith(f" {one}") for other in splits)]


def as_text(data: list[dict], form: str = "text") -> str:
    """Return the table of rows of :func:`~fairseq_lowrank.records.contrasts.as_rows`."""
    by_sentence = any(row["sentences_low"] is not None for row in data)
    columns = {
        "contrast": lambda row: row["contrast"],
        "seeds": lambda row: row["seeds"],
        "difference": lambda row: f"{row['mean']:.4g}",
        "95 % interval (t)": lambda row: _interval(row["low"], row["high"]),
        "p (t)": lambda row: format_p(row["t_p"]),
        "Holm": lambda row: format_p(row["t_holm"]),
        "better": lambda row: row["better"] or "–",
    }
    if by_sentence:
        columns["95 % over sentences"] = lambda row: _interval(row["sentences_low"], row["sentences_high"])
        columns["p (sentences)"] = lambda row: format_p(row["sentences_p"])
    if any(row["both_low"] is not None for row in data):
        columns["95 % over both"] = lambda row: _interval(row["both_low"], row["both_high"])
    columns["above 0"] = lambda row: f"{row['positive']} of {row['seeds']}"
    columns["p (signs)"] = lambda row: format_p(row["signs_p"])
    header, rows = list(columns), [[str(cell(row)) for cell in columns.values()] for row in data]
    notes = [f"{row['contrast']}: {note}" for row in data for note in row["notes"]]
    if any(row["sentences_low"] is not None and row["both_low"] is None for row in data):
        notes.append(NEITHER)
    about = heading(data)
    if form == "latex":
        comments = [f"% {formats.escape_latex(note)}" for note in notes]
        return "\n".join([r"% needs \usepackage{booktabs}", *comments, formats.latex(header, rows, about)])
    if form == "markdown":
        return "\n\n".join([formats.escape(about), formats.markdown(header, rows), *map(formats.escape, notes)])
    return "\n".join([about, "", _output.table(header, rows), *notes])


def _interval(low: float | None, high: float | None) -> str:
    return "–" if low is None else f"{low:.4g} … {high:.4g}"


def format_p(value: float | None) -> str:
    """Return a p-value as text."""
    if value is None:
        return "–"
    if value < LEAST_P:
        return f"<{LEAST_P:.0e}"
    return f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"
