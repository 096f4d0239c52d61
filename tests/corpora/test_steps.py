"""Steps that preparations share."""

import pytest

from fairseq_lowrank.corpora.steps import read_pairs
from fairseq_lowrank.corpora.text import write_lines


def test_sides_of_different_length_are_refused(tmp_path):
    write_lines(tmp_path / "de", ["eins", "zwei"])
    write_lines(tmp_path / "en", ["one"])
    with pytest.raises(ValueError, match="do not have equally many lines"):
        list(read_pairs(tmp_path / "de", tmp_path / "en"))
