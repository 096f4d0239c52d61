"""Print the folder to give to fairseq's --user-dir, wherever this package is installed.

fairseq-train DATA --user-dir "$(fairseq-lowrank user-dir)" --arch lowrank_transformer …
"""

from pathlib import Path

import fairseq_lowrank

NAME = "user-dir"
HELP = "print the folder for fairseq's --user-dir"


def add_arguments(parser) -> None:
    """No arguments."""


def run(args) -> None:
    print(Path(fairseq_lowrank.__file__).resolve().parent)
