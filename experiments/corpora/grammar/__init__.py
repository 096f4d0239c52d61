"""German and English text of a small grammar, for the quickstart; see README.md here."""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.corpora.corpus import Argument, Corpus, positive
from experiments.corpora.fetch import make
from experiments.corpora.grammar import corpus
from experiments.corpora.steps import binarise
from fairseq_lowrank.files import say, whole_folder

# The first digits of the SHA-256 of the corpus's files, in the order of their names; a test checks it. Other words or rules
# make another corpus, whose folder has another name.
EDITION = "261a4f87"


def write(folder: Path, training: int | None) -> None:
    """Write SPLIT.de and SPLIT.en; `folder` appears when it is complete."""
    sizes = corpus.SPLITS | ({"train": training} if training else {})
    with whole_folder(folder) as part:
        corpus.write(part, sizes, seed=1)
    say("sentence pairs: " + ", ".join(f"{size:,} {split}" for split, size in sizes.items()))


def grammar(args: argparse.Namespace) -> Path:
    """Prepare German and English text of a small grammar, with words as tokens; nothing is downloaded."""
    folder = args.output / "tok"
    make(folder, write, folder, args.head)
    return binarise(args, folder, args.corpus.languages)


CORPUS = Corpus(
    name="grammar",
    prepare=grammar,
    arguments=(
        Argument(
            "--edition",
            part="-{}",
            affects_files=False,
            choices=(EDITION,),
            default=EDITION,
            help="edition of the grammar",
        ),
        Argument("--head", part="-head{}", type=positive, metavar="N", help="use N pairs for training, for a trial"),
    ),
    languages=("de", "en"),
    moses={"escape": False},  # the grammar makes the tokens of these rules
    smoke_values={"head": 2000},
)
# The name for recipes.
NAME = CORPUS.variant_name({"edition": EDITION})
