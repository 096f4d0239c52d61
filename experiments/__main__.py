"""The command ``python -m experiments``."""

import sys
from collections.abc import Sequence

from experiments import commands
from fairseq_lowrank.cli import run_subcommand


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    description = "Controlled tasks, reports and comparisons of our experiments."
    return run_subcommand("python -m experiments", description, commands, argv)


if __name__ == "__main__":
    sys.exit(main())
