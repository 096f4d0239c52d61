"""Published BERTs and models fine-tuned on sentences or questions: 'python -m experiments bert ACTION --help' explains an action."""

import argparse
import sys

from fairseq_lowrank import cli

NAME = "bert"
HELP = "import a published BERT, cut text into its subwords, predict with a fine-tuned model"


def add_arguments(parser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, module in cli.command_modules(sys.modules[__name__]).items():
        action = actions.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(action)
        action.set_defaults(action=module)


def run(args) -> None:
    args.action.run(args)
