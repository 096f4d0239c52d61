"""Steps that preparations share."""

import pytest

from fairseq_lowrank.corpora.steps import read_pairs
from fairseq_lowrank.corpora.text import BytePieces, write_lines


def test_sides_of_different_length_are_refused(tmp_path):
    write_lines(tmp_path / "de", ["eins", "zwei"])
    write_lines(tmp_path / "en", ["one"])
    with pytest.raises(ValueError, match="do not have equally many lines"):
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
