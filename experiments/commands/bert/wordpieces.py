"""Cut text into the subwords (word pieces) of a BERT, for fairseq-preprocess: separated by blanks, one sentence per line.

  python -m experiments bert wordpieces bert-base/wordpieces.json train.txt --output train.pieces
  fairseq-preprocess --only-source --srcdict bert-base/dict.txt --trainpref train.pieces …

'bert import' writes the file wordpieces.json.
"""

from pathlib import Path

from fairseq_lowrank.cli import _output
from fairseq_lowrank.messages import FlagError, UserError

NAME = "wordpieces"
HELP = "cut text into the subwords of a BERT"


def add_arguments(parser) -> None:
    parser.add_argument("pieces", type=Path, metavar="PIECES", help="wordpieces.json")
    parser.add_argument("text", type=Path, metavar="TEXT", help="a text with one sentence per line, plain or .gz")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="file of the subwords")
    _output.add_force_argument(parser)
    parser.set_defaults(check_output=_output.check_file)
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="number of processes (default: 1)")


def run(args) -> None:
    from experiments.corpora.text import map_lines
    from experiments.corpora.wordpieces import WordPieces

    if args.workers < 1:
        raise FlagError("--workers", args.workers, "expected a number >= 1", "Give a number of processes.")
    for path in (args.pieces, args.text):
        if not path.is_file():
            raise UserError(f"{path} does not exist. Give the path of a file.")
    map_lines(WordPieces(args.pieces), args.text, args.output, args.workers)
