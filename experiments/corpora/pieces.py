"""The subwords of a pre-trained model: those of a published BERT, or of a corpus that is prepared here."""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.corpora.corpus import Argument, work_folder
from experiments.corpora.cutting import Cutter
from experiments.corpora.fetch import PIECES, has_begun, sha256
from experiments.corpora.text import BytePieces
from experiments.corpora.wordpieces import WordPieces
from fairseq_lowrank.files import whole_file
from fairseq_lowrank.messages import UserError

PIECES_OF = Argument(
    "--pieces-of",
    part="-by-{}",
    value="[a-z0-9][a-z0-9.-]*",
    metavar="FORM",
    help="cut into the subwords of a prepared corpus, such as brown-bpe8000 (default: the word pieces of --bert)",
)
BERT = Argument(
    "--bert",
    part="-from-{}",
    value="[A-Za-z0-9][A-Za-z0-9._-]*",
    shown=lambda folder: Path(folder).resolve().name,
    metavar="DIR",
    help="folder of a published BERT, made by `python -m experiments bert import`, or its name in $LOWRANK_WORK; its word pieces are "
    "used without --pieces-of (default: bert-base)",
)


def model_and_dictionary_paths(args: argparse.Namespace) -> tuple[Path, Path]:
    """Return the paths of the model and the dictionary that :data:`PIECES_OF` and :data:`BERT` choose."""
    if args.pieces_of:
        folder = work_folder() / "data" / args.pieces_of
        return folder / "bpe.model", folder / "bin" / "dict.txt"
    folder = Path(args.bert or "bert-base")
    if args.bert is None or not (folder / "wordpieces.json").is_file():
        folder = work_folder() / folder
    return folder / "wordpieces.json", folder / "dict.txt"


def load_cutter_and_dictionary(args: argparse.Namespace) -> tuple[Cutter, Path]:
    """Return the cutter that :data:`PIECES_OF` and :data:`BERT` choose, and the path of its dictionary.

    Raises:
        UserError: the corpus or the published BERT does not exist.
    """
    model, dictionary = model_and_dictionary_paths(args)
    if not (model.is_file() and dictionary.is_file()):
        folder = model.parent
        if args.pieces_of:
            raise UserError(
                f"--pieces-of {args.pieces_of}: {folder} is not prepared, or has no subwords. Use a corpus such as brown-bpe8000, "
                "after scripts/prepare.sh brown-bpe8000."
            )
        raise UserError(
            f"{folder} has no wordpieces.json and dict.txt. Make them from a published BERT with python -m experiments bert import FOLDER "
            f"--output {folder}, give their folder with --bert, or use the subwords of a corpus: --pieces-of brown-bpe8000."
        )
    if not has_begun(args.output):
        with whole_file(args.output / PIECES) as file:
            file.write(f"{sha256(model)} {sha256(dictionary)}\n")
    with open(model, "rb") as file:
        kind = WordPieces if file.read(1) == b"{" else BytePieces
    return Cutter(kind(model)), dictionary


def check_pieces(args: argparse.Namespace) -> None:
    """Refuse to continue in --output if its subwords have been replaced by others.

    The arguments name a folder, which may have another published BERT now. If it has none, the existing files are still used.
    """
    files, note = model_and_dictionary_paths(args), args.output / PIECES
    if not (note.is_file() and all(file.is_file() for file in files)):  # old folders have no such note
        return
    if note.read_text(encoding="utf-8").split() != [sha256(file) for file in files]:
        raise UserError(
            f"{args.output} was cut into other word pieces than those that are now in {files[0].parent}. Put the old ones back, or "
            f"remove {args.output}."
        )
