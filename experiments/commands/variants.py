"""What each kind of attention is: formula, parameters, cache, flags, code, paper, and what was measured here.

  python -m experiments variants                              the table of all
  python -m experiments variants mixhead-b gqa                their pages
  python -m experiments variants --output docs/variants       every page and the table, as files

Parameters and cache are counted on a layer that is built for it, and rows are looked up among `--results`.
"""

from pathlib import Path

from fairseq_lowrank.cli import _output
from fairseq_lowrank.messages import UserError

NAME = "variants"
HELP = "a page for each kind of attention: formula, costs, flags, code, paper, our rows"


def add_arguments(parser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="VARIANT", help="a preset of --attention, sigsoftmax, …; see the table"
    )
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="folder of results files (default: the repository's)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder to write to: every page, or those named, as VARIANT.md"
    )
    parser.set_defaults(check_output=_output.check_folder)


def run(args) -> None:
    import sys

    from experiments import variants

    if unknown := [name for name in args.names if name not in variants.VARIANTS]:
        raise UserError(f"variant {unknown[0]!r}: expected one of {', '.join(variants.VARIANTS)}")
    results = args.results or variants.RESULTS
    if args.results and not args.results.is_dir():
        raise UserError(f"--results {args.results}: is not a folder. Give a folder of results files (.jsonl).")
    pages = {f"{name}.md": variants.page(name, results) for name in args.names}
    if args.output is None:
        _output.say(("\n".join(pages.values()) if pages else variants.index()).removesuffix("\n"))
        return
    pages = pages or variants.pages(results)

    def fill(folder: Path) -> None:
        for file, text in pages.items():
            (folder / file).write_text(text, encoding="utf-8")

    print("wrote", *_output.write_together(args.output, fill), file=sys.stderr)
