"""Steps that preparations share."""

import gzip
import re

import pytest

from experiments.corpora.steps import read_pairs
from experiments.corpora.text import BytePieces
from fairseq_lowrank.files import read_lines, write_lines


def test_sides_of_different_length_are_refused(tmp_path):
    write_lines(tmp_path / "de", ["eins", "zwei"])
    write_lines(tmp_path / "en", ["one"])
    with pytest.raises(ValueError, match="have different numbers of lines"):
        list(read_pairs(tmp_path / "de", tmp_path / "en"))


def test_the_dictionary_has_every_piece_so_that_no_byte_is_unknown(prepare, tmp_path):
    from fairseq.data import Dictionary, data_utils

    data = tmp_path / "data"
    for split, text in {"train": "plain words\n" * 40, "valid": 'é {"}\n', "test": "\u2014 ~\n"}.items():
        data.mkdir(exist_ok=True)
        (data / f"wiki.{split}.raw").write_text(text)
    assert prepare("wikitext-2-bpe270", "--data", data)[0] == 0
    folder = tmp_path / "work" / "data" / "wikitext-2-bpe270"
    pieces = BytePieces(folder / "bpe.model").pieces
    dictionary = Dictionary.load(str(folder / "bin" / "dict.txt"))
    assert len(pieces) == 269 and set(pieces) <= set(dictionary.symbols)
    counts = [dictionary.count[dictionary.index(piece)] for piece in dictionary.symbols[dictionary.nspecial :]]
    assert counts == sorted(counts, reverse=True) and counts[0] > 0 == counts[-1]
    for split in ("train", "valid", "test"):
        for sentence in data_utils.load_indexed_dataset(str(folder / "bin" / split), dictionary):
            assert not sentence.eq(dictionary.unk()).any()


@pytest.mark.parametrize("joined", ["multi30k", "multi30k-x4"])
@pytest.mark.parametrize(
    ("split", "kept", "message"),
    [
        ("train", 119, "de has 120 lines and .*train.en has 119"),
        ("test_2016_flickr", 0, "test.de has 20 lines and .* has 0:"),
    ],
)
def test_parallel_text_whose_lines_do_not_belong_together_is_refused(
    prepare, shorten, corpus, tmp_path, joined, split, kept, message
):
    data = shorten(corpus("multi30k"), tmp_path / "data", train=120, val=20, test_2016_flickr=20)
    file = data / f"{split}.en.gz"
    lines = gzip.decompress(file.read_bytes()).splitlines(keepends=True)
    file.write_bytes(gzip.compress(b"".join(lines[len(lines) - kept :])))
    status, said = prepare(joined, "--data", data, "--pieces", 200)
    assert status == 2 and re.search(message, said) and "expected the same number" in said
    assert not (tmp_path / "work" / "data" / "multi30k" / "bin").exists()
    assert not (tmp_path / "work" / "data" / "multi30k-x4").exists()


def test_a_corpus_of_before_whose_lines_do_not_belong_together_is_not_joined(prepare, shorten, corpus, tmp_path):
    data = shorten(corpus("multi30k"), tmp_path / "data", train=120, val=20, test_2016_flickr=20)
    assert prepare("multi30k", "--data", data, "--pieces", 200)[0] == 0
    file = tmp_path / "work" / "data" / "multi30k" / "bpe" / "valid.en"
    write_lines(file, list(read_lines(file))[1:])
    status, said = prepare("multi30k-x4", "--data", data, "--pieces", 200)
    assert status == 2 and "valid.de has 20 lines" in said and "valid.en has 19" in said
