"""IWSLT'14, German to English."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from experiments.corpora.corpus import Argument, Corpus, positive
from experiments.corpora.fetch import gather, make
from experiments.corpora.steps import JOIN, binarise, campaign_segments, read_pairs, segment, tokenise, write_pairs
from experiments.corpora.text import SubwordNMT, clean_pairs
from fairseq_lowrank.files import read_lines, write_lines

URLS = {"http://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz": None}
# fairseq's script concatenates them in this order.
TEST = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")


def campaign_training(path: Path) -> Iterator[str]:
    """Yield the sentences of a campaign's train.tags file, with titles and descriptions, without other tagged lines."""
    for line in read_lines(path):
        if not re.search("<(url|talkid|keywords)>", line):
            yield re.sub("</?(title|description)>", "", line).strip()


TEST_FILES = [f"IWSLT1[46].{part}.de-en.{language}.xml" for language in ("de", "en") for part in TEST]
TRAINING_FILES = [f"train.tags.de-en.{language}" for language in ("de", "en")]


def iwslt14_test(args: argparse.Namespace, files: list[Path]) -> None:
    """Write tok/test: the tokenised sentences of TEST_FILES."""
    count = len(TEST)
    for language, parts in (("de", files[:count]), ("en", files[count:])):
        raw = args.output / "raw" / f"test.{language}"
        make(raw, write_lines, raw, chain.from_iterable(map(campaign_segments, parts)))
        tokenise(args, raw, f"test.{language}", language)


def iwslt14_training(args: argparse.Namespace, files: list[Path]) -> None:
    """Write tok/train and tok/valid from TRAINING_FILES.

    Pairs are tokenised, have 1 to 175 tokens and a length ratio of at most 1.5. Each 23rd pair is for validation.
    """
    tokenised = []
    for file, language in zip(files, ("de", "en"), strict=True):
        raw = args.output / "raw" / f"train.{language}"
        make(raw, write_lines, raw, campaign_training(file))
        tokenised.append(tokenise(args, raw, f"all.{language}", language))
    for split in ("train", "valid"):
        first, second = (args.output / "tok" / f"{split}.{language}" for language in ("de", "en"))
        pairs = enumerate(clean_pairs(read_pairs(*tokenised), longest=175, ratio=1.5), start=1)
        chosen = (pair for number, pair in pairs if (number % 23 == 0) == (split == "valid"))
        make(first, write_pairs, first, second, chosen)


def iwslt14(args: argparse.Namespace) -> Path:
    """Prepare IWSLT'14 German to English like fairseq's script: lower-cased, Moses-tokenised, 10k joint BPE.

    Separate dictionaries, fairseq's default, have the 8,848 and 6,632 types of the Mixhead paper. The test set is the
    concatenation of dev2010, TEDX dev2012, tst2010, tst2011 and tst2012.
    """
    # all in one call: some files may be in --data, and others downloaded
    names = TEST_FILES if args.test_only else TEST_FILES + TRAINING_FILES
    files = gather(args, names, URLS, "; the evaluation XML alone is enough for the test set, with --test-only")
    iwslt14_test(args, files[: len(TEST_FILES)])
    if args.test_only:
        return args.output / "tok"
    iwslt14_training(args, files[len(TEST_FILES) :])
    names = [f"{split}.{language}" for split in ("train", "valid", "test") for language in ("de", "en")]
    pieces = segment(args, SubwordNMT, args.operations, names)
    return binarise(args, pieces, ("de", "en"), *(["--joined-dictionary"] if args.joined_dictionary else []))


def published(args: argparse.Namespace, root: Path) -> str:
    """Return the folder; the test set is also in later campaigns' development data, which is often available alone."""
    return "iwslt14" if (root / "iwslt14").exists() else "ted-de-en"


CORPUS = Corpus(
    name="iwslt14",
    prepare=iwslt14,
    arguments=(
        Argument("--operations", type=positive, default=10000, help="joint BPE merges (default: %(default)s)"),
        Argument("--joined-dictionary", part="-joined", action="store_true", help="one dictionary for both languages"),
        Argument(
            "--test-only", affects_files=False, action="store_true", help="only the test set, tokenised, from its XML"
        ),
        JOIN,
    ),
    languages=("de", "en"),
    moses={"lowercase": True},
    remove_bpe="subword_nmt",
    published=published,
    published_help="iwslt14, or ted-de-en",
    download=19,
)
