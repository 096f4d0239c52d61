"""Show results of runs next to the values that the papers publish.

The command reads the JSON lines of the recipes. It prints a Markdown table for every table of a paper that has results: our
value next to the paper's, and mean and spread over seeds. If a higher score is better, it adds PRR and PEoP. If a run has
another scale than the paper's, it adds the difference: a smoke run, other sizes, or another number of updates (fewer than the
recipe's, if the paper gives none). Tables are never mixed: the Mixhead paper calls its tables 7 to 10 comparable only within
themselves.

  python -m experiments report results/
  python -m experiments report results/ --paper mixhead --table table4
  python -m experiments report results/ --output report/           report.md and the learning curves
  python -m experiments report mine.jsonl --format latex                 lines that `record` wrote: means ± deviations by row

PRR (performance retention ratio) is 100 · score / score of the mha row. PEoP (performance elasticity of parameters) is
the relative gain in score over the sha row, divided by the relative gain in attention parameters. Both are from the MHE poster,
which prints values without formulas; these formulas give its values.
"""

from pathlib import Path

from fairseq_lowrank.cli import _output
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.records.formats import FORMATS

NAME = "report"
HELP = "print results next to the papers' values, with learning curves"


def add_arguments(parser) -> None:
    parser.add_argument("results", type=Path, nargs="+", help="folders of .jsonl files, or such files")
    parser.add_argument("--paper", help="show only this paper (mixhead, mhe, fixedhead, …)")
    parser.add_argument("--table", help="show only this table (table4, wmt14, …), also if it has no results yet")
    parser.add_argument(
        "--format", choices=FORMATS, default="markdown", help="format of the tables (default: %(default)s)"
    )
    _output.add_output_arguments(
        parser, "report.md, with --format latex report.tex, the curves as .png and .pdf, report.json and .csv"
    )


def run(args) -> None:
    from experiments.papers import comparison, curves, tables, values

    lines = comparison.load_results(args.results)
    found = comparison.build_report(lines, values.load_papers(), paper=args.paper, table=args.table)
    if not found:
        asked = "".join(f" for {name}" for name in (args.paper, args.table) if name)
        where = ", ".join(map(str, args.results))
        remedy = (
            "Add --table NAME to show its published values." if args.paper and not args.table else "Give other files."
        )
        raise UserError(f"no results{asked} in {where}. {remedy}")
    drawn = plot_figures(curves.by_plot(found)) if args.output else {}
    text = tables.as_markdown(found, {name: f"{file}.png" for name, (file, _) in drawn.items()})
    pages = {"report.md": text}
    if args.format == "latex":
        text = tables.as_latex(found)
        pages["report.tex"] = text + "\n"
    _output.show(args, found, text)
    rows = [{"paper": table["paper"], "table": table["table"], **score} for table in found for score in flat(table)]
    _output.write(args, NAME, found, rows, dict(drawn.values()), pages)


def plot_figures(plots: dict[str, list[dict]]) -> dict[str, tuple[str, object]]:
    """Return the file name and the figure of each plot."""
    from experiments.papers import curves
    from fairseq_lowrank.tools import pictures

    files = pictures.file_names("curves", plots)
    return {name: (files[name], curves.plot_curves(plots[name], name)) for name in plots}


def flat(table: dict):
    """Yield a flat row for each of our scores in a table."""
    for row in table["rows"]:
        for score in row["ours"]["scores"] if row["ours"] else []:
            yield {
                "row": row["row"],
                **{key: score.get(key) for key in ("split", "metric", "mean", "spread", "prr", "peop")},
                **{key: row["ours"][key] for key in ("parameters", "attention_parameters")},
                "other_scale": "; ".join(row["ours"]["other_scale"]),
            }
