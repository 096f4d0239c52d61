"""The tokenizer of exported models reads and writes raw text as fairseq-lowrank translate does."""

import json
from dataclasses import asdict

import pytest

pytest.importorskip("transformers")

import sentencepiece
from transformers import AutoTokenizer

from fairseq_lowrank.huggingface.exported import LowrankTokenizer
from fairseq_lowrank.raw_text import RawText, TextSettings

LINES = ["Der Hund läuft nicht.", "Eine Katze, sagt man, schläft.", "Katzen & Hunde schlafen, z.B. heute."]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
MOSES = {"lowercase": True, "normalise": True, "aggressive": True}


def sentencepiece_model(path):
    with path.open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([line.lower() for line in LINES * 5]),
            model_writer=model,
            vocab_size=40,
            hard_vocab_limit=False,
            minloglevel=2,
        )


def merges(path):
    path.write_text("#version: 0.2\nu n\nun d\nh und\nk a\nka t\nkat z\n", encoding="utf-8")


CUTS = {
    "words": (None, None, None),
    "moses": (MOSES, None, None),
    "sentencepiece": ({"lowercase": True}, "sentencepiece", sentencepiece_model),
    "subword_nmt": (MOSES, "subword_nmt", merges),
}


@pytest.mark.parametrize("cut", CUTS)
def test_tokenizer_reads_and_writes_raw_text(cut, tmp_path):
    moses, kind, make = CUTS[cut]
    settings, model = TextSettings("de", "en", moses, kind), tmp_path / "subwords.model"
    if make is not None:
        make(model)
    text = RawText(settings, model)
    words = sorted({word for line in LINES for word in text.encode(line).split()})
    source, target = [*SPECIAL, *words], [*SPECIAL, *reversed(words), "more"]
    files = {"vocab_file": source, "target_vocab_file": target, "text_file": asdict(settings)}
    for name, content in files.items():
        place = tmp_path / ("text.json" if name == "text_file" else f"{name}.json")
        place.write_text(json.dumps(content))
        files[name] = str(place)
    if make is not None:
        files["subwords_file"] = str(model)
    LowrankTokenizer(
        **files, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="left"
    ).save_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert isinstance(tokenizer, LowrankTokenizer)
    expected = [[*(source.index(word) for word in text.encode(line).split()), 2] for line in LINES]
    assert tokenizer(LINES).input_ids == expected
    labels = tokenizer(text_target=LINES[0]).input_ids
    english = RawText(TextSettings("en", "en", moses, kind), model)
    assert labels == [*(target.index(word) if word in target else 3 for word in english.encode(LINES[0]).split()), 2]
    assert tokenizer.decode(labels, skip_special_tokens=True) == text.decode(
        " ".join(target[number] for number in labels[:-1])
    )
    assert tokenizer(LINES[0]).input_ids == expected[0]  # the target's mode has ended
    batch = tokenizer(LINES, padding=True)
    assert batch.input_ids[0][0] == 1 and batch.attention_mask[0][0] == 0


def test_special_tokens_in_text_are_words_and_unknown_words_stay(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps([*SPECIAL, "a", "b"]))
    tokenizer = LowrankTokenizer(
        str(tmp_path / "vocab.json"), bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    assert tokenizer("a<pad>b c\u2028b").input_ids == [3, 3, 5, 2]
    assert tokenizer("a b").input_ids == [4, 5, 2]
    assert tokenizer.decode([2, 4, 3, 5, 2, 1], skip_special_tokens=True) == "a <unk> b"


@pytest.mark.parametrize("starts_with", [None, "</s>"])
def test_special_tokens_are_marked_and_added_tokens_decoded(starts_with, tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps([*SPECIAL, "a", "b"]))
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    ends = {"starts_with": starts_with, "ends_with_eos": starts_with is None}
    tokenizer = LowrankTokenizer(str(tmp_path / "vocab.json"), **special, **ends)
    found = tokenizer("a b", return_special_tokens_mask=True)
    assert found.special_tokens_mask == [int(number == 2) for number in found.input_ids] and len(found.input_ids) == 3
    tokenizer.add_tokens(["new"])
    assert tokenizer.decode(tokenizer("a new b").input_ids, skip_special_tokens=True) == "a new b"
