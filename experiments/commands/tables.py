"""Print the tables of an experiment from the lines in `results/`: its set-up, every row by seed, contrasts and predictions.

  python -m experiments tables                              the names
  python -m experiments tables language-model
  python -m experiments tables predictions --csv            the tables alone, with an empty line between two

`times` prints the files of the benchmarks in `benchmarks/results/`.
"""

from fairseq_lowrank.cli import _output
from fairseq_lowrank.messages import UserError

NAME = "tables"
HELP = "print the tables of an experiment from the lines in results/, as Markdown or CSV"


def add_arguments(parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of the tables (default: print the names)")
    parser.add_argument("--csv", action="store_true", help="print the tables as CSV, without their notes")


def run(args) -> None:
    from experiments.evidence import tables

    if args.name is None:
        _output.say("\n".join(f"{name:16} {about}" for name, (about, _) in tables.SECTIONS.items()))
        return
    if args.name not in tables.SECTIONS:
        raise UserError(f"NAME {args.name!r}: unknown. Use one of {', '.join(tables.SECTIONS)}.")
    page = tables.page(args.name)
    _output.say((tables.as_csv(page) if args.csv else page).removesuffix("\n"))
