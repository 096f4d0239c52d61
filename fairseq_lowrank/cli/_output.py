"""What every analysis command does with its result: a table or JSON on the screen, and files in a folder."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path


def add_output_arguments(parser, files: str) -> None:
    """`--json` and `--output DIR`; `files` says what is written there."""
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON instead of a table")
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"folder to write to: {files}")


def show(args, data, text: str) -> None:
    """Print JSON or the text, whichever was asked for."""
    print(json.dumps(data, indent=2, ensure_ascii=False) if args.json else text)


def write(args, name: str, data, rows: list[dict], figures: dict) -> None:
    """Write NAME.json, NAME.csv and every figure as PNG and PDF to `--output`, if given, and say which files."""
    if args.output is None:
        return
    from fairseq_lowrank.analysis import pictures

    args.output.mkdir(parents=True, exist_ok=True)
    paths = [args.output / f"{name}.json", args.output / f"{name}.csv"]
    paths[0].write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    with open(paths[1], "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    for figure_name, figure in figures.items():
        paths += pictures.save(figure, args.output, figure_name)
    print("wrote", *paths, file=sys.stderr)


def table(header: list[str], rows: list[list]) -> str:
    """Aligned columns: the first to the left, numbers to the right."""
    cells = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)
