"""The One Billion Word benchmark."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq_lowrank.corpora.corpus import Corpus
from fairseq_lowrank.corpora.fetch import gather
from fairseq_lowrank.corpora.steps import BYTES, HEAD, language_model

URL = "http://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz"
SHA256 = "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e"


def lm1b(args: argparse.Namespace) -> Path:
    """One Billion Word benchmark (Chelba et al., 2014): words seen three times or more, or sub-words with --pieces.

    The first held-out part is the test set, as is usual since Jozefowicz et al. (2016), the second is for validation.
    """
    training = [f"news.en-{number:05}-of-00100" for number in range(1, 100)]
    heldout = [f"news.en.heldout-{number:05}-of-00050" for number in (1, 0)]
    files = gather(args, training + heldout, {URL: SHA256})
    return language_model(args, {"train": files[:-2], "valid": files[-2:-1], "test": files[-1:]}, "--thresholdsrc=3")


CORPUS = Corpus(name="lm1b", prepare=lm1b, arguments=(HEAD, BYTES))
