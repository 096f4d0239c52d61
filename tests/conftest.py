"""Shared by every test. Imports no fairseq, so that ops and attention can be tested without it."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

# What each folder of real data is and where it comes from, for the message when it is missing.
CORPORA = {
    "multi30k": "raw Multi30k, SPLIT.de.gz and SPLIT.en.gz, from github.com/multi30k/dataset",
    "ted-de-en": "the De-En development sets of IWSLT (XML), from wit3.fbk.eu",
    "wikitext-2": "WikiText-2's valid.txt.gz and test.txt.gz, from hf.co/datasets/Salesforce/wikitext",
    "brown": "the Brown corpus as train.txt.gz, valid.txt.gz and test.txt.gz, from nltk.org/nltk_data",
    "rte": "RTE 1 to 3 (XML), from nltk.org/nltk_data",
    "sentence-polarity": "rt-polarity.pos.gz and .neg.gz, from cs.cornell.edu/people/pabo/movie-review-data",
    "xquad": "xquad.en.json.gz, from github.com/google-deepmind/xquad",
}


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="device for the tests of ops and attention")


@pytest.fixture(scope="session")
def device(request):
    """The name of the device for tests of ops and attention."""
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def corpus():
    """``corpus(name)``: the folder of a real corpus; without it the test is skipped, in CI it fails."""
    root = Path(os.environ.get("LOWRANK_DATA", REPOSITORY.parent / "shared" / "data"))

    def find(name: str) -> Path:
        if (root / name).is_dir():
            return root / name
        message = f"no {root / name}: put {CORPORA[name]} there, or set LOWRANK_DATA to the folder above it"
        if os.environ.get("CI"):
            pytest.fail(message)
        return pytest.skip(message)

    return find
