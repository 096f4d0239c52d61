"""Subwords of sentencepiece that are single bytes become text again."""

from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

from fairseq.data import Dictionary, data_utils, encoders

import fairseq_lowrank.plugin  # noqa: F401

LINES = ["a dog runs", "a cat ate the 日本 — now", "<0x41> is no byte", "end 日"]


@pytest.fixture
def pieces(tmp_path):
    """An encoder of fairseq whose model cuts unknown characters into bytes."""
    sentencepiece = pytest.importorskip("sentencepiece")
    with open(tmp_path / "spm.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the cat ate a dog that runs now is no end byte <0x41>"] * 9),
            model_writer=file,
            model_type="bpe",
            vocab_size=310,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    config = {"sentencepiece_model": str(tmp_path / "spm.model")}
    config |= {"sentencepiece_enable_sampling": False, "sentencepiece_alpha": None}
    return encoders.build_bpe(SimpleNamespace(bpe="sentencepiece", **config))


@pytest.mark.parametrize("line", LINES)
def test_joined_subwords_are_the_text(pieces, line):
    cut = pieces.encode(line)
    assert ("<0xE6> <0x97> <0xA5>" in cut) == ("日" in line)
    assert pieces.decode(cut) == pieces.sp.decode(cut.split()) == line  # --bpe sentencepiece
    assert data_utils.post_process(cut, "sentencepiece") == line  # --remove-bpe sentencepiece
    dictionary = Dictionary()
    tokens = dictionary.encode_line(cut)
    assert dictionary.string(tokens, "sentencepiece") == line


def test_bytes_that_are_no_text_keep_their_line():
    assert data_utils.post_process("▁a <0xE6> <0x97> ▁b", "sentencepiece") == "a\ufffd b"
    assert data_utils.post_process("▁a <0x0A> <0xE2> <0x80> <0xA8> b", "sentencepiece") == "a  b"


@pytest.mark.parametrize("symbol", [None, "none", "subword_nmt", "@@ "])
def test_other_subwords_stay_as_they_are(symbol):
    assert data_utils.post_process("a <0x41> b", symbol) == "a <0x41> b"
