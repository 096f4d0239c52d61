"""Compare rows of results: differences paired by seed and sentence, with an interval and p-values.

Each contrast is A − B over the seeds that both rows have, or an interaction (A − B) − (C − D). For each the table shows

- the number of seeds, the mean difference, Student's 95 % interval over seeds and its p;
- this p after Holm's correction over all contrasts (a contrast without a p, as with one seed, counts as 1);
- the better side, if the interval does not contain 0;
- a 95 % interval and a p over test sentences, for these trainings, if lines have `sentence_values`, or `sentence_counts` of BLEU;
- a 95 % interval over seeds and sentences, with three seeds or more: the others cover either other seeds or other sentences;
- the number of seeds in which the difference is above 0, and the p of all choices of signs.

A file of contrasts (`--contrasts`) contains predictions: "> 0", "< 0", "at most 0.01", or "= 0" with a `margin`. The table
then shows the outcome: held, contradicted or unclear. "= 0" holds if two one-sided t-tests place the difference within the
margin. A line of results needs `row`, `seed`, `metric` and `value`; other fields are compared if lines have them.

  fairseq-lowrank compare results/multi30k.jsonl --pair mha mixhead-a --pair mha mixhead-b --metric sacrebleu
  fairseq-lowrank compare results/ --table matrices --logarithm --pair n16-shared-h16-mha n16-shared-h16-mixhead-a
  fairseq-lowrank compare runs.jsonl --interaction mixhead-a-h32 mha-h32 mixhead-a mha
  fairseq-lowrank compare results/ --table fast-start --contrasts examples/evidence/contrasts.json

If lines have several scores, `--metric` and `--split` choose one. `--metric bits --split valid` compares validation losses.
BLEU is not a mean over sentences, so each draw of sentences adds up their counts and computes BLEU again.
"""

from collections.abc import Collection
from pathlib import Path

from fairseq_lowrank.cli import _output
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.tools.reporting import formats

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
        "--contrasts",
        type=Path,
        metavar="FILE",
        help="JSON file of contrasts that were chosen before the runs; needs --table",
    )
    parser.add_argument(
        "--logarithm", action="store_true", help="compare natural logarithms, so a difference shows a ratio"
    )
    parser.add_argument(
        "--format",
        choices=("text", *formats.FORMATS),
        default="text",
        help="format of the table (default: %(default)s)",
    )
    _output.add_output_arguments(parser, "compare.csv and .json, the contrasts as .png and .pdf")


def run(args) -> None:
    if not args.pair and not args.interaction and not args.contrasts:
        raise UserError(
            "nothing to compare. Name rows with --pair A B or --interaction A B C D, or add --contrasts FILE."
        )
    chosen_otherwise = args.pair or args.interaction or args.logarithm or args.metric or args.split
    if args.contrasts and (chosen_otherwise or not args.table):
        raise UserError(
            f"--contrasts {args.contrasts}: needs --table, and the file chooses the rest. Add --table TABLE, and remove "
            "--pair, --interaction, --logarithm, --metric and --split."
        )

    from fairseq_lowrank.tools.reporting import contrasts

    wanted = {name: value for name in ("paper", "table", "metric", "split") if (value := getattr(args, name))}
    lines = contrasts.load(args.results)
    rows = [row for asked in (*args.pair, *args.interaction) for row in asked]
    if args.contrasts:
        lines = [line for line in lines if all(line.get(name) == value for name, value in wanted.items())]
        found = contrasts.compare_planned(lines, contrasts.read_planned(args.contrasts, args.table))
    else:
        lines = contrasts.select(lines, wanted, rows)
        found = contrasts.compare_rows(lines, args.pair, args.interaction, logarithm=args.logarithm)
    data = contrasts.as_rows(found)
    text = as_text(data, args.format)
    pages = {f"{NAME}.{ENDINGS[args.format]}": text + "\n"} if args.format in ENDINGS else {}
    _output.show(args, data, text)
    _output.write(args, NAME, data, data, plot_figures(data) if args.output else {}, pages)


def plot_figures(data: list[dict]) -> dict:
    """Return a figure for each unit, because differences of bits and of BLEU need separate axes."""
    from fairseq_lowrank.tools import pictures
    from fairseq_lowrank.tools.reporting import contrasts

    units = list(dict.fromkeys(row["unit"] for row in data))
    names = {units[0]: NAME} if len(units) == 1 else pictures.file_names(NAME, units)
    return {
        name: contrasts.plot_contrasts([row for row in data if row["unit"] == unit]) for unit, name in names.items()
    }


def heading(data: list[dict]) -> str:
    """Return a sentence for each metric: its direction, its data and its seeds."""
    found: dict[str, tuple[dict, dict]] = {}
    for row in data:
        if row["mean"] is not None:
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
    planned = any(row["prediction"] for row in data)
    by_sentence = any(row["sentences_low"] is not None for row in data)
    columns = {
        "contrast": lambda row: row["contrast"],
        "seeds": lambda row: "–" if row["seeds"] is None else row["seeds"],
        "difference": lambda row: "–" if row["mean"] is None else f"{row['mean']:.4g}",
        "95 % interval (t)": lambda row: _interval(row["low"], row["high"]),
        "p (t)": lambda row: _p(row["t_p"]),
        "Holm": lambda row: _p(row["t_holm"]),
        "better": lambda row: row["better"] or "–",
    }
    if planned:
        columns["predicted"] = predicted
        columns["outcome"] = lambda row: row["outcome"] or "–"
        columns["p (within margin)"] = lambda row: _p(row["equivalence_p"])
    if by_sentence:
        columns["95 % over sentences"] = lambda row: _interval(row["sentences_low"], row["sentences_high"])
        columns["p (sentences)"] = lambda row: _p(row["sentences_p"])
    if any(row["both_low"] is not None for row in data):
        columns["95 % over both"] = lambda row: _interval(row["both_low"], row["both_high"])
    columns["above 0"] = lambda row: "–" if row["seeds"] is None else f"{row['positive']} of {row['seeds']}"
    columns["p (signs)"] = lambda row: _p(row["signs_p"])
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
    return "\n".join([*([about, ""] if about else []), _output.table(header, rows), *notes])


def predicted(row: dict) -> str:
    margin = "" if row["margin"] is None else f" ± {row['margin']:g}"
    return f"{row['prediction'] or '–'}{margin}"


def _interval(low: float | None, high: float | None) -> str:
    return "–" if low is None else f"{low:.4g} … {high:.4g}"


def _p(value: float | None) -> str:
    if value is None:
        return "–"
    if value < LEAST_P:
        return f"<{LEAST_P:.0e}"
    return f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"
