"""WikiText-2 and WikiText-103."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

from experiments.corpora.corpus import Argument, Corpus
from experiments.corpora.fetch import gather, make
from experiments.corpora.steps import BYTES, HEAD, language_model
from fairseq_lowrank.files import read_lines, write_lines
from fairseq_lowrank.messages import UserError

URL = "https://wikitext.smerity.com/wikitext-{}-v1.zip"
LINES = {"2": 36_718, "103": 1_801_350}  # of the training part
SHA256 = {
    "2": "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    "103": "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    "2-raw": "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
    "103-raw": "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
}


def articles(path: Path) -> Iterator[str]:
    """Yield the lines of a split with one empty line after each article, and without the edition's other empty lines.

    ``= Title =`` between empty lines begins an article, and ``= = Heading = =`` a section. A formula may look like a title, but
    it has no empty lines around it.
    """
    began, before = False, ""
    for line, behind in pairwise(chain(read_lines(path), [""])):
        if line.strip():
            alone = not before.strip() and not behind.strip()
            if began and alone and re.fullmatch(r"= [^=](.*[^=])? =", line.strip()):
                yield ""
            yield line
            began = True
        before = line
    yield ""


def wikitext(args: argparse.Namespace) -> Path:
    """Prepare WikiText-2 or -103 (Merity et al., 2017): word tokens as published, or the raw edition with --pieces."""
    edition = args.size if args.pieces is None else f"{args.size}-raw"
    ending = "tokens" if args.pieces is None else "raw"
    splits = ("train", "valid", "test")
    names = [f"wiki.{split}.{ending}|{split}.txt" for split in splits]
    files = gather(args, names, {URL.format(edition): SHA256[edition]})
    lines = sum(1 for _ in read_lines(files[0]))
    for size, published in LINES.items():
        if size != args.size and lines == published:
            raise UserError(
                f"--size {args.size}: {files[0]} has the {lines:,} lines of WikiText-{size}. Use --size {size}."
            )
    if args.documents:
        parted = [args.output / "raw" / f"{split}.txt" for split in splits]
        for source, target in zip(files, parted, strict=True):
            make(target, write_lines, target, articles(source))
        files = parted
    return language_model(args, {split: [file] for split, file in zip(splits, files, strict=True)})


def published(args: argparse.Namespace, root: Path) -> str:
    return f"wikitext-{args.size}" + ("" if args.pieces is None else "-raw")


CORPUS = Corpus(
    name="wikitext",
    prepare=wikitext,
    arguments=(
        Argument(
            "--size", part="-{}", choices=("2", "103"), default="103", help="size of WikiText (default: %(default)s)"
        ),
        Argument(
            "--documents",
            part="-documents",
            action="store_true",
            help="put one empty line after each article and remove others; --task bert_pretraining needs this",
        ),
        HEAD,
        BYTES,
    ),
    published=published,
    published_help="wikitext-SIZE, with --pieces wikitext-SIZE-raw",
    download=190,
)
