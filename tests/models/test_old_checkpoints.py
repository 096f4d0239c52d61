"""Checkpoints of earlier versions mean what they meant: they load strictly and decode the same."""

import json

import pytest

pytest.importorskip("fairseq")

from old_checkpoints import ANSWERS, FOLDER, answer


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.pt")), ids=lambda path: path.stem)
def test_an_old_checkpoint_decodes_as_it_did(path):
    expected = json.loads(ANSWERS.read_text())[path.stem]
    for hypothesis, before in zip(answer(path), expected, strict=True):
        assert hypothesis["tokens"] == before["tokens"]
        assert hypothesis["scores"] == pytest.approx(before["scores"], abs=2e-4)
