"""The command ``python -m experiments``."""

import sys
from collections.abc import Sequence

from experiments import commands
from fairseq_lowrank import cli
from fairseq_lowrank.files import say

MOVED = ("compare", "record", "report")
"""Commands that are in the package now. Their former names work until version 0.2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in MOVED:
        say(f"python -m experiments {words[0]} is now fairseq-lowrank {words[0]}")
        return cli.main(words)
    description = "Controlled tasks and other experiments of the repository."
    return cli.run_subcommand("python -m experiments", description, commands, argv)


if __name__ == "__main__":
    sys.exit(main())
