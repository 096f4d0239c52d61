"""Test contrasts that were predicted before the runs: held, contradicted or unclear.

  python -m experiments contrasts examples/evidence/contrasts.json results/ --table fast-start

The file has a list of contrasts for each table: their rows, metric, split and prediction. A prediction is "> 0", "< 0",
"at most 0.01", or "= 0" with a `margin`. "= 0" holds if two one-sided t-tests place the difference within the margin. The other
columns are those of `fairseq-lowrank compare`.
"""

from pathlib import Path

from fairseq_lowrank.cli import compare

NAME = "contrasts"
HELP = "test contrasts that were predicted before the runs"


def add_arguments(parser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON file of contrasts")
    parser.add_argument("results", type=Path, nargs="+", help="folders of .jsonl files, or such files")
    parser.add_argument("--table", required=True, help="table of the file and of the results")
    parser.add_argument("--paper", help="use only lines of this paper")
    compare.add_format_arguments(parser, NAME)


def run(args) -> None:
    from experiments.papers import planned
    from fairseq_lowrank.records import contrasts

    wanted = {name: value for name in ("paper", "table") if (value := getattr(args, name))}
    plans = planned.read_planned(args.file, args.table)
    lines = [line for line in contrasts.load(args.results) if all(line.get(name) == wanted[name] for name in wanted)]
    data = planned.as_rows(planned.compare_planned(lines, plans))
    compare.show(args, NAME, data, compare.as_text(data, args.format, planned.COLUMNS), planned.plot_planned)
