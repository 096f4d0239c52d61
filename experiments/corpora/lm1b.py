"""The One Billion Word benchmark."""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.corpora.corpus import Argument, Corpus
from experiments.corpora.fetch import gather
from experiments.corpora.steps import BYTES, HEAD, language_model

URL = "http://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz"
SHA256 = "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e"


def lm1b(args: argparse.Namespace) -> Path:
    """Prepare the One Billion Word benchmark (Chelba et al., 2014): words that occur three times, or subwords with --pieces.

    The first held-out part is the test set, as is usual since Jozefowicz et al. (2016); the second is for validation. With
    --all-heldout, all 50 held-out parts are the test set, about 300,000 sentences. Then the last training part, which has the
    same size, is for validation.
    """
    training = [f"news.en-{number:05}-of-00100" for number in range(1, 100)]
    heldout = [f"news.en.heldout-{number:05}-of-00050" for number in (range(50) if args.all_heldout else (1, 0))]
    files = gather(args, training + heldout, {URL: SHA256})
    valid, test = (98, 99) if args.all_heldout else (99, 100)
    parts = {"train": files[:valid], "valid": files[valid:test], "test": files[test:]}
    return language_model(args, parts, "--thresholdsrc=3")


CORPUS = Corpus(
    name="lm1b",
    prepare=lm1b,
    arguments=(
        Argument("--all-heldout", part="-all-heldout", action="store_true", help="test on all 50 held-out parts"),
        HEAD,
        BYTES,
    ),
    download=1800,
)
