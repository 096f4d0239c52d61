"""Print the pages of the attention variants: formula, parameters, cache, flags, code, paper, and our measurements.

  python -m experiments variants                              the table of all variants
  python -m experiments variants mixhead-b gqa                the pages of two variants
  python -m experiments variants --output docs/variants       every page and the table, as files

Parameters and cache are counted on a built layer. Measurements are read from `--results`.
"""

from pathlib import Path

from fairseq_lowrank.cli import _output
from fairseq_lowrank.messages import UserError

NAME = "variants"
HELP = "print a page for each attention method: formula, costs, flags, code, paper, measurements"


def add_arguments(parser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="VARIANT", help="a preset of --attention, sigsoftmax, … (default: the table of all)"
    )
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="folder of results files (default: the repository's)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder to write to: VARIANT.md of each named variant (default: of all)",
    )
    parser.set_defaults(check_output=_output.check_folder)


def run(args) -> None:
    from experiments import variants

    if unknown := [name for name in args.names if name not in variants.variants()]:
        raise UserError(f"VARIANT {unknown[0]!r}: unknown. Use one of {', '.join(variants.variants())}.")
    results = args.results or variants.RESULTS
    if args.results and not args.results.is_dir():
        raise UserError(f"--results {args.results}: is not a folder. Give a folder of results files (.jsonl).")
    if args.output is None:
        text = "\n".join(variants.pages(results, args.names).values()) if args.names else variants.index()
        _output.say(text.removesuffix("\n"))
        return
    pages = variants.pages(results, args.names)

    def fill(folder: Path) -> None:
        for file, text in pages.items():
            (folder / file).write_text(text, encoding="utf-8")

    _output.write_together(args, fill)
