"""Checkpoints of earlier versions mean what they meant: they load strictly and decode the same."""

import json

import pytest

pytest.importorskip("fairseq")

from old_checkpoints import ANSWERS, NAMES, answer


@pytest.mark.parametrize("name", NAMES)
def test_an_old_checkpoint_decodes_as_it_did(name, old_checkpoint):
    expected = json.loads(ANSWERS.read_text())[name]
    for hypothesis, before in zip(answer(old_checkpoint(name)), expected, strict=True):
        assert hypothesis["tokens"] == before["tokens"]
        assert hypothesis["scores"] == pytest.approx(before["scores"], abs=2e-4)
