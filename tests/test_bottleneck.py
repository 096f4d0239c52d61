"""docs/bottleneck.md: its figure, its classes and its numbers."""

import re
from pathlib import Path

import pytest

from experiments.evidence import bottleneck
from fairseq_lowrank.attention import METHODS

PAGE = (Path(__file__).resolve().parent.parent / "docs/bottleneck.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("causal", [False, True])
def test_the_error_of_one_head_vanishes_at_the_size_that_the_page_names(causal, monkeypatch):
    monkeypatch.setattr(bottleneck, "LENGTH", 7)
    errors, enough = bottleneck.errors(causal), 3 if causal else 6
    assert all(error > 1e-3 for error in errors[: enough - 1]) and all(error < 1e-3 for error in errors[enough - 1 :])


def test_the_table_of_classes_names_presets_in_their_class():
    rows = re.findall(r"^\| (\w+) \| .+ \| ([^|]+) \|$", PAGE.partition("## The five classes")[2], re.MULTILINE)
    found = {preset: kind for kind, methods in rows for preset in re.findall(r"`([\w-]+)`", methods)}
    assert len(found) > 20 and found == {preset: METHODS[preset].kind for preset in found}


def test_the_figure_shows_every_recorded_row():
    assert all(0 < value < 1 for value in bottleneck.recorded().values())
