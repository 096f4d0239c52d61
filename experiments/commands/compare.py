"""Compare rows of results: differences paired by seed and sentence, with an interval and p-values.

Each contrast is A − B over the seeds that both rows have, or an interaction (A − B) − (C − D). For each: the mean
difference, a 95 % interval of a two-level bootstrap (seeds, then sentences; 10,000 draws) and its p, in how many seeds the
difference is above 0 with the p of all choices of signs, Student's t over seeds, and both p-values after Holm's correction
over all contrasts named (one that has no p, as with one seed or before it was run, counts as 1). Sentences count where lines have `sentence_values`, one number a sentence in one order; else each
line's value is one.

  python -m experiments compare results/multi30k.jsonl --pair mha mixhead-a --pair mha mixhead-b --metric sacrebleu
  python -m experiments compare results/ --table matrices --logarithm --pair n16-shared-h16-mha n16-shared-h16-mixhead-a
  python -m experiments compare runs.jsonl --interaction mixhead-a-h32 mha-h32 mixhead-a mha
  python -m experiments compare results/ --table fast-start --contrasts examples/evidence/contrasts.json

With 3 to 5 seeds the bootstrap is too sure of itself: read it beside t. BLEU is no mean over sentences, so its lines
compare by seed alone; for sentences take `sacrebleu REFERENCES -i A B --paired-bs`.
"""

from pathlib import Path

from fairseq_lowrank.cli import _output

NAME = "compare"
HELP = "compare rows of results, paired by seed and sentence, with p-values"


def add_arguments(parser) -> None:
    parser.add_argument("results", type=Path, nargs="+", help="a folder of .jsonl files, or such files")
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
        parser.add_argument(f"--{name}", help=f"only lines of this {name}, where rows have several")
    parser.add_argument(
        "--contrasts",
        type=Path,
        metavar="FILE",
        help="a JSON file of contrasts by table, named before the runs; takes --table",
    )
    parser.add_argument(
        "--logarithm", action="store_true", help="compare natural logarithms: differences are then of ratios"
    )
    _output.add_output_arguments(parser, "compare.csv and .json, the contrasts as .png and .pdf")


def run(args) -> None:
    if not args.pair and not args.interaction and not args.contrasts:
        raise ValueError("nothing to compare: name rows with --pair A B or --interaction A B C D, or --contrasts FILE")
    chosen_otherwise = args.pair or args.interaction or args.logarithm or args.metric or args.split
    if args.contrasts and (chosen_otherwise or not args.table):
        raise ValueError(
            f"--contrasts {args.contrasts}: expected --table beside it, and no --pair, --interaction, --logarithm, --metric "
            "or --split, which the file chooses"
        )

    from experiments.reporting import contrasts

    wanted = {name: value for name in ("paper", "table", "metric", "split") if (value := getattr(args, name))}
    lines = contrasts.load(args.results, wanted)
    if args.contrasts:
        found = contrasts.of_named(lines, contrasts.read_named(args.contrasts, args.table))
    else:
        found = contrasts.between(lines, args.pair, args.interaction, logarithm=args.logarithm)
    data = contrasts.as_rows(found)
    _output.show(args, data, as_text(data))
    _output.write(args, NAME, data, data, figures(data) if args.output else {})


def figures(data: list[dict]) -> dict:
    """A picture for each unit, since differences of bits and of BLEU have no axis in common."""
    from experiments.reporting import contrasts
    from fairseq_lowrank.tools import pictures

    units = list(dict.fromkeys(row["unit"] for row in data))
    names = {units[0]: NAME} if len(units) == 1 else pictures.file_names(NAME, units)
    return {name: contrasts.draw([row for row in data if row["unit"] == unit]) for unit, name in names.items()}


def as_text(data: list[dict]) -> str:
    header = ["contrast", "difference", "95 % interval", "p", "Holm", "above 0", "p signs", "t", "p t", "Holm t"]
    rows = [
        [
            row["contrast"],
            "–" if row["mean"] is None else f"{row['mean']:.4g}",
            "–" if row["low"] is None else f"{row['low']:.4g} … {row['high']:.4g}",
            _p(row["bootstrap_p"]),
            _p(row["bootstrap_holm"]),
            "–" if row["seeds"] is None else f"{row['positive']} of {row['seeds']}",
            _p(row["signs_p"]),
            "–" if row["t"] is None else f"{row['t']:.2f}",
            _p(row["t_p"]),
            _p(row["t_holm"]),
        ]
        for row in data
    ]
    notes = [f"{row['contrast']}: {note}" for row in data for note in row["notes"]]
    return "\n".join([_output.table(header, rows), *notes])


def _p(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"
