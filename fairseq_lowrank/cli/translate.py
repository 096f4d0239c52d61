"""Translate raw text with a checkpoint: one sentence per line in, one translation per line out.

    fairseq-lowrank translate checkpoints/checkpoint_best.pt text.de > text.en
    echo "Ein Hund läuft." | fairseq-lowrank translate checkpoints/checkpoint_best.pt

Without files the command reads standard input; in a terminal it translates each line at once. Data of scripts/prepare.sh knows
how its text was tokenised and cut into subwords. For data of fairseq-preprocess, give --moses and --subwords as needed. If its
dictionary has no capital letter, --moses lower-cases.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from fairseq_lowrank.cli import _output
from fairseq_lowrank.files import first_folder
from fairseq_lowrank.messages import FlagError, UserError

NAME = "translate"
HELP = "translate raw text with a checkpoint"
SHOWS_TIME = False


def add_arguments(parser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="checkpoint of a translation model")
    parser.add_argument(
        "files", type=Path, nargs="*", metavar="FILE", help="text with one sentence per line (default: standard input)"
    )
    parser.add_argument(
        "--beam", type=int, default=5, metavar="N", help="hypotheses of the search (default: %(default)s)"
    )
    parser.add_argument(
        "--lenpen", type=float, default=1.0, metavar="X", help="more gives longer translations (default: %(default)s)"
    )
    parser.add_argument(
        "--data", type=first_folder, metavar="DIR", help="the binarised data (default: the model's training data)"
    )
    parser.add_argument("--moses", action="store_true", help="tokenise by Moses's rules; for data without text.json")
    parser.add_argument(
        "--subwords",
        type=Path,
        metavar="FILE",
        help="sentencepiece's model, or the codes of subword-nmt; for data without text.json",
    )


def run(args) -> None:
    if args.beam < 1:
        raise FlagError("--beam", args.beam, "expected a number >= 1", "Give a number of hypotheses.")
    for path in args.files:
        if not path.is_file():
            raise UserError(f"{path}: there is no such file. Give the name of a text.")
    from fairseq_lowrank.tools.fairseq.translation import Translator

    translator = Translator(args.checkpoint, data=args.data, moses=args.moses, subwords=args.subwords)
    for place, lines in parts(args.files):
        try:
            for translation in translator.translate(lines, beam=args.beam, lenpen=args.lenpen):
                _output.say_data(translation)
        except UserError as error:
            raise UserError(f"{place}: {error}") from error


def parts(files: list[Path]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the lines of each file; without files those of standard input, in a terminal one by one."""
    from fairseq_lowrank.files import read_input, read_lines

    if files:
        yield from ((str(path), list(read_lines(path))) for path in files)
    elif sys.stdin.isatty():
        yield from (("input", [line]) for line in read_input())
    else:
        yield "input", list(read_input())
