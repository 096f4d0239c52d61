"""Fixtures for the tests of the plugin."""

import pytest


@pytest.fixture
def enable(monkeypatch):
    """``enable("bf16-evaluation")``: apply the optional patches of a name during a test."""
    from fairseq_lowrank.plugin.patches import PATCHES, locate

    def apply(name: str) -> None:
        chosen = [patch for patch in PATCHES if patch.name == name and patch.group == "optional"]
        assert chosen
        for patch in chosen:
            holder, attribute = locate(patch.target)
            monkeypatch.setattr(holder, attribute, patch.wrap(getattr(holder, attribute)))

    return apply
