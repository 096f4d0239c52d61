"""Parsed arguments tell the command that parsed them."""

import argparse

import pytest
from fairseq import options

from fairseq_lowrank.repairs.programs import Program, program_of

PARSERS = {
    Program.TRAIN: options.get_training_parser,
    Program.INTERACTIVE: options.get_interactive_generation_parser,
    Program.EVAL_LM: options.get_eval_lm_parser,
    Program.GENERATE: options.get_generation_parser,
    Program.VALIDATE: options.get_validation_parser,
    None: options.get_preprocessing_parser,
}


@pytest.mark.parametrize("program", PARSERS, ids=str)
def test_each_parser_of_fairseq_is_told_by_its_flags(program):
    flags = [action.dest for action in PARSERS[program]()._actions]
    assert program_of(argparse.Namespace(**dict.fromkeys(flags))) is program
