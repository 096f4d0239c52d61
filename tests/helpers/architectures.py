"""Arguments of architectures, for tests of what is built from them."""

import argparse
import functools
from copy import copy

from fairseq_lowrank.plugin.flags import add_attention_args
from fairseq_lowrank.tools.fairseq.architecture import STACKS, parse_architecture

parsed = functools.cache(parse_architecture)


@functools.cache
def independent_flags():
    """Return a parser of the flags on which no default of an architecture depends."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_attention_args(parser)
    for stack in STACKS:
        for size in ("layers", "attention-heads"):
            parser.add_argument(f"--{stack}-{size}", type=int, default=argparse.SUPPRESS)
    return parser


def arguments(architecture, flags=()):
    """Return what `parse_architecture` returns. fairseq parses only flags on which a default may depend, and once."""
    independent, others = independent_flags().parse_known_args(flags)
    args = copy(parsed(architecture, tuple(others)))
    vars(args).update(vars(independent))
    return args
