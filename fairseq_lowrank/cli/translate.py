"""Translate raw text with a checkpoint: one sentence per line in, one translation per line out.

    fairseq-lowrank translate checkpoints/checkpoint_best.pt text.de > text.en
    echo "Ein Hund läuft." | fairseq-lowrank translate checkpoints/checkpoint_best.pt

Without files the command reads standard input; in a terminal it translates each line at once. Data of scripts/prepare.sh knows
how its text was tokenised and cut into subwords. For data of fairseq-preprocess, give --moses and --subwords as needed. If its
dictionary has no capital letter, --moses lower-cases.
"""

import math
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
    add_search_arguments(parser)


def add_search_arguments(parser) -> None:
    """Add the settings of the search, and of the text; `export` has them too."""
    parser.add_argument(
        "--beam", type=int, default=5, metavar="N", help="hypotheses of the search (default: %(default)s)"
    )
    parser.add_argument(
        "--lenpen", type=float, default=1.0, metavar="X", help="more gives longer translations (default: %(default)s)"
    )
    parser.add_argument(
        "--max-len-b",
        type=int,
        default=200,
        metavar="N",
        help="most tokens of a translation, as in fairseq-generate (default: %(default)s)",
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


def check_search_arguments(args) -> None:
    """Refuse settings of the search that have no meaning."""
    for flag, value in (("--beam", args.beam), ("--max-len-b", args.max_len_b)):
        if value < 1:
            raise FlagError(flag, value, "expected a number >= 1", "Give a larger number.")
    if not math.isfinite(args.lenpen):
        raise FlagError("--lenpen", args.lenpen, "expected a finite number", "Give a number such as 1.")


def run(args) -> None:
    check_search_arguments(args)
    for path in args.files:
        if not path.is_file():
            raise UserError(f"{path}: there is no such file. Give the name of a text.")
    from fairseq_lowrank.tools.fairseq.translation import Translator

    translator = Translator(args.checkpoint, data=args.data, moses=args.moses, subwords=args.subwords)
    for place, lines in parts(args.files):
        try:
            for translation in translator.translate(lines, beam=args.beam, lenpen=args.lenpen, longest=args.max_len_b):
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
