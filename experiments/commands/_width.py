"""The flag `--width` of commands that draw pictures for papers."""

from argparse import ArgumentTypeError
from typing import Any

WIDTHS = (2, 40)


def add_argument(parser) -> None:
    """Add `--width INCHES`, which :func:`fitted` reads."""
    text = "width of the pictures of --output, such as 3.3 for a paper's column"
    parser.add_argument("--width", type=_inches, metavar="INCHES", help=text)


def _inches(text: str) -> float:
    if not WIDTHS[0] <= (width := float(text)) <= WIDTHS[1]:
        raise ArgumentTypeError(f"{text}: expected inches from {WIDTHS[0]} to {WIDTHS[1]}. Give 3.3 for a column.")
    return width


def fitted(args, figures: dict[str, Any]) -> dict[str, Any]:
    """Return figures by their names, each as wide as `--width` says, and as high as it needs to be."""
    if figures:
        from experiments import layout

        for figure in figures.values():
            layout.fit(figure, args.width)
    return figures
