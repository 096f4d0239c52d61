"""Each fix can be switched off by its name, and the optional patch is off until it is named."""

import pytest

pytest.importorskip("fairseq")

from fairseq_lowrank.repairs import checkpoints, patch, search

TABLE = (*search.PATCHES, *checkpoints.PATCHES)
FIXES = sorted({each.name for each in TABLE if each.group == "fix"})


@pytest.fixture
def names_with(monkeypatch):
    """``names_with(enable, disable)``: the names of the patches that these values of the variables leave on."""

    def names(enable="", disable=""):
        monkeypatch.setenv(patch.ENABLE, enable)
        monkeypatch.setenv(patch.DISABLE, disable)
        return sorted({each.name for each in patch.selected(TABLE)})

    return names


def test_fixes_are_on_and_the_limit_is_off(names_with):
    assert names_with() == FIXES
    assert names_with(enable="own-length-limit") == sorted([*FIXES, "own-length-limit"])


@pytest.mark.parametrize("name", FIXES)
def test_fix_is_off_if_disabled(names_with, name):
    assert names_with(disable=name) == [other for other in FIXES if other != name]
