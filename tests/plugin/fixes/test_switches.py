"""Each fix can be switched off by its name, and the optional patch is off until it is named."""

import pytest

pytest.importorskip("fairseq")

from fairseq_lowrank.plugin import fixes, patches

FIXES = sorted({patch.name for patch in fixes.PATCHES if patch.group == "fix"})


@pytest.fixture
def names_with(monkeypatch):
    """``names_with(enable, disable)``: the names of the patches that these values of the variables leave on."""

    def names(enable="", disable=""):
        monkeypatch.setenv(patches.ENABLE, enable)
        monkeypatch.setenv(patches.DISABLE, disable)
        return sorted({patch.name for patch in patches.selected(fixes.PATCHES)})

    return names


def test_fixes_are_on_and_the_limit_is_off(names_with):
    assert names_with() == FIXES
    assert names_with(enable="own-length-limit") == sorted([*FIXES, "own-length-limit"])


@pytest.mark.parametrize("name", FIXES)
def test_fix_is_off_if_disabled(names_with, name):
    assert names_with(disable=name) == [other for other in FIXES if other != name]
