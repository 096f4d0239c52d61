"""The corpus that the grammar makes. Its edition, a hash of all sentences, holds each form of German and English."""

import hashlib
import logging
from itertools import islice

from experiments.corpora.grammar import EDITION, NAME, corpus


def test_a_seed_decides_the_corpus():
    first, again, other = (list(islice(corpus.pairs(seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_corpus_is_that_of_its_edition(tmp_path):
    corpus.write(tmp_path, corpus.SPLITS, seed=1)
    content = b"".join(path.read_bytes() for path in sorted(tmp_path.iterdir()))
    assert hashlib.sha256(content).hexdigest()[:8] == EDITION


def test_no_sentence_repeats_and_none_of_valid_or_test_is_in_training(tmp_path):
    corpus.write(tmp_path, {"train": 3000, "valid": 300, "test": 300}, seed=1)
    for language in ("de", "en"):
        lines = [
            line for split in corpus.SPLITS for line in (tmp_path / f"{split}.{language}").read_text().splitlines()
        ]
        assert len(set(lines)) == len(lines) == 3600


def test_a_third_of_the_training_set_has_nearly_every_word_of_new_sentences():
    sample = [[text.split() for text in pair] for pair in islice(corpus.pairs(5), 4000)]
    pairs = [[text.split() for text in pair] for pair in islice(corpus.pairs(1), corpus.SPLITS["train"] // 3)]
    for language in (0, 1):
        known = {word for pair in pairs for word in pair[language]}
        words = [word for pair in sample for word in pair[language]]
        assert sum(word not in known for word in words) < 0.005 * len(words)


def test_the_grammar_is_a_corpus_like_any_other(prepare, tmp_path):
    folder = tmp_path / "work" / "data" / f"{NAME}-head300"
    (folder / "tok.0123abcd.part" / "of a process that was killed").mkdir(parents=True)
    status, said = prepare(NAME, "--head", 300)
    assert (status, said) == (0, str(folder / "bin"))
    assert (folder / "bin" / "train.de-en.de.bin").exists() and not [*folder.glob("*.part")]
    files = [getattr(handler, "baseFilename", "") for handler in logging.getLogger("fairseq_cli.preprocess").handlers]
    assert not [file for file in files if ".part" in file]  # no log stays open in a folder that has moved
    corpus.write(tmp_path / "again", corpus.SPLITS | {"train": 300}, seed=1)
    for file in (tmp_path / "again").iterdir():
        assert (folder / "tok" / file.name).read_text() == file.read_text()
