"""The command ``python -m experiments``."""

import sys
from collections.abc import Sequence

from experiments import commands
from fairseq_lowrank import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    description = "Controlled tasks and other experiments of the repository."
    return cli.run_subcommand("python -m experiments", description, commands, argv)


if __name__ == "__main__":
    sys.exit(main())
