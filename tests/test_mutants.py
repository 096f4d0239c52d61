"""The list of wrong changes stays true: python -m tests.mutants can make each of them."""

import ast
import shlex
from collections import Counter

import pytest

from tests.mutants import ROOT, read_mutants

MUTANTS = read_mutants()


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_every_change_fits_its_file_once(file):
    source = (ROOT / file).read_text(encoding="utf-8")
    for mutant in MUTANTS:
        if mutant.file == file:
            assert source.count(mutant.old) == 1, mutant.name
            assert mutant.new != mutant.old, mutant.name
            ast.parse(source.replace(mutant.old, mutant.new))


def test_changes_have_names_and_tests_of_their_own():
    assert len(MUTANTS) >= 60
    assert Counter(map(str, MUTANTS)).most_common(1)[0][1] == 1
    paths = {word for mutant in MUTANTS for word in shlex.split(mutant.tests) if word.startswith("tests/")}
    assert not [path for path in paths if not (ROOT / path).is_file()]


def test_a_change_is_made_in_the_copy_alone(tmp_path):
    mutant = MUTANTS[0]
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    copy.write_text(source, encoding="utf-8")
    mutant.apply(tmp_path)
    assert copy.read_text(encoding="utf-8") == source.replace(mutant.old, mutant.new)
    assert (ROOT / mutant.file).read_text(encoding="utf-8") == source
