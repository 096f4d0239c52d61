"""Checkpoints of earlier versions mean what they meant: they load strictly and decode the same."""

import json

import pytest

pytest.importorskip("fairseq")

from old_checkpoints import ANSWERS, FOLDER, answer

from fairseq_lowrank.attention import PRESETS


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.pt")), ids=lambda path: path.stem)
def test_an_old_checkpoint_decodes_as_it_did(path):
    expected = json.loads(ANSWERS.read_text())[path.stem]
    for hypothesis, before in zip(answer(path), expected, strict=True):
        assert hypothesis["tokens"] == before["tokens"]
        assert hypothesis["scores"] == pytest.approx(before["scores"], abs=2e-4)


def test_there_is_one_of_every_preset():
    assert {path.stem.rpartition("-")[0] for path in FOLDER.glob("*.pt")} & set(PRESETS)
