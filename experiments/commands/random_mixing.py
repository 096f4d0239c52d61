"""Compute the spectra of trained mixing next to those of the same patterns with other matrices M.

  python -m experiments random-mixing mha.pt mixhead.pt --labels mha mixhead-a --output pictures/

The arguments and the output are those of `fairseq-lowrank inspect --spectrum`. For each checkpoint with one M for all queries there
are four controls: the same patterns without mixing, and mixed by a random M at the same distance from I, by M with random entries
of the same norm off its diagonal, and by M with the entries off its diagonal shuffled within each column.
"""

from fairseq_lowrank.cli import _output, inspect
from fairseq_lowrank.messages import UserError

NAME = "random-mixing"
HELP = "compute the spectra of trained mixing, and of random matrices instead"


def add_arguments(parser) -> None:
    inspect.add_arguments(parser)
    parser.set_defaults(spectrum=True)


def run(args) -> None:
    from experiments import random_mixing
    from fairseq_lowrank.cli import _spectra

    inspect.check(args)
    view = _spectra.view(args, random_mixing.read)
    if len(view.data) == len(args.checkpoints):
        raise UserError("no checkpoint has one M for all queries, as --attention mixhead-a has. Give one that has.")
    _output.publish(args, view)
