"""Multi30k task 1, German to English."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

from experiments.corpora.corpus import Argument, Corpus, positive
from experiments.corpora.fetch import gather, make
from experiments.corpora.steps import HEAD, JOIN, binarise, segment, tokenise
from experiments.corpora.text import SentencePiece
from fairseq_lowrank.files import read_lines, write_lines

URL = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/"
FILES = {
    "train.de.gz": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.en.gz": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "val.de.gz": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.en.gz": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "test_2016_flickr.de.gz": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    "test_2016_flickr.en.gz": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
}


def multi30k(args: argparse.Namespace) -> Path:
    """Prepare Multi30k task 1 (Elliott et al., 2016), German to English: lower-cased, tokenised, joint BPE and dictionary."""
    files = gather(args, FILES, {URL + name: checksum for name, checksum in FILES.items()})
    names = [f"{split}.{language}" for split in ("train", "valid", "test") for language in ("de", "en")]
    for name, file in zip(names, files, strict=True):
        if args.head:
            file = make(
                args.output / "raw" / name, write_lines, args.output / "raw" / name, islice(read_lines(file), args.head)
            )
        tokenise(args, file, name, name[-2:])
    # so few lines have no more pieces than they are
    pieces = segment(args, SentencePiece, min(args.pieces, args.head or args.pieces), names)
    return binarise(args, pieces, ("de", "en"), "--joined-dictionary")


CORPUS = Corpus(
    name="multi30k",
    prepare=multi30k,
    arguments=(
        HEAD,
        Argument("--pieces", type=positive, default=6000, help="size of the joint BPE (default: %(default)s)"),
        JOIN,
    ),
    languages=("de", "en"),
    moses={"lowercase": True, "normalise": True, "escape": False},
    remove_bpe="sentencepiece",
    smoke_values={"head": 500},
    download=1,
)
