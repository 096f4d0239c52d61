"""WMT'14, English to German."""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path

from experiments.corpora.corpus import Argument, Corpus, positive
from experiments.corpora.fetch import gather, make
from experiments.corpora.steps import binarise, campaign_segments, read_pairs, segment, tokenise, write_pairs
from experiments.corpora.text import SubwordNMT, clean_pairs
from fairseq_lowrank.files import read_lines, write_lines

URLS = {
    "http://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz": None,
    "http://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz": None,
    "http://www.statmt.org/wmt14/training-parallel-nc-v9.tgz": None,
    "http://data.statmt.org/wmt17/translation-task/dev.tgz": None,
    "http://statmt.org/wmt14/test-full.tgz": None,
}
TRAINING = ("europarl-v7.de-en", "commoncrawl.de-en", "news-commentary-v9.de-en")


def wmt14(args: argparse.Namespace) -> Path:
    """Prepare WMT'14 English to German: Europarl, Common Crawl and News Commentary v9; newstest2013 and newstest2014.

    Text is normalised and tokenised, with hyphens split. Pairs have 1 to 250 tokens and a length ratio of at most 1.5. BPE and
    dictionary are joint. fairseq's own script counts these lengths in subwords, validates on a hundredth of the training pairs,
    and normalises the punctuation of the training text only. Here newstest is normalised too, so the references of
    `tokenised_bleu` have other quotation marks and dashes.
    """
    languages = args.corpus.languages
    training = [f"{part}.{language}" for language in languages for part in TRAINING]
    evaluation = [
        f"newstest{name}-{kind}.{language}.sgm"
        for name, kinds in (("2013", ("src", "ref")), ("2014-deen", ("src", "ref")))
        for kind, language in zip(kinds, languages, strict=True)
    ]
    files = gather(args, training + evaluation, URLS)
    tokenised = []
    for index, language in enumerate(languages):
        raw = args.output / "raw" / f"train.{language}"
        parts = files[index * len(TRAINING) :][: len(TRAINING)]
        make(raw, write_lines, raw, chain.from_iterable(map(read_lines, parts)))
        tokenised.append(tokenise(args, raw, f"all.{language}", language))
    first, second = (args.output / "tok" / f"train.{language}" for language in languages)
    make(first, write_pairs, first, second, clean_pairs(read_pairs(*tokenised), longest=250, ratio=1.5))
    names = [f"{split}.{language}" for split in ("valid", "test") for language in languages]
    for name, file in zip(names, files[len(training) :], strict=True):
        raw = args.output / "raw" / name
        make(raw, write_lines, raw, campaign_segments(file))
        tokenise(args, raw, name, name[-2:])
    names += [f"train.{language}" for language in languages]
    pieces = segment(args, SubwordNMT, args.operations, names)
    return binarise(args, pieces, languages, "--joined-dictionary")


CORPUS = Corpus(
    name="wmt14",
    prepare=wmt14,
    arguments=(Argument("--operations", type=positive, default=40000, help="joint BPE merges (default: %(default)s)"),),
    languages=("en", "de"),
    moses={"normalise": True, "aggressive": True},
    remove_bpe="subword_nmt",
    download=1700,
)
