"""Raw sentences go in and come out, and between them are the tokens and the search of fairseq-generate."""

import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

from sacremoses import MosesDetokenizer

from experiments.corpora.__main__ import main as prepare
from experiments.corpora.wordpieces import WordPieces
from fairseq_lowrank import cli
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.models.transformer import LowrankTransformerModel
from fairseq_lowrank.progress import Progress
from fairseq_lowrank.raw_text import SUBWORDS
from fairseq_lowrank.records.scores import read_run
from fairseq_lowrank.tools.fairseq.translation import Translator, raw_text

PAIRS = [
    ("Der Hund läuft nicht.", "The dog isn't running."),
    ("Eine Katze, sagt man, schläft.", "A cat, they say, sleeps."),
    ("Katzen & Hunde schlafen.", "Cats & dogs sleep."),
    ("Der Hund schläft nicht.", "The dog isn't sleeping."),
]
SIZES = [
    *("--encoder-layers", "1", "--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "32"),
    *("--decoder-layers", "1", "--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "32"),
    *("--encoder-attention-heads", "4", "--decoder-attention-heads", "4", "--dropout", "0"),
]
TRAINING = [
    *("--optimizer", "adam", "--lr", "0.01", "--max-tokens", "4000", "--max-epoch", "60", "--cpu"),
    *("--num-workers", "0", "--disable-validation", "--no-epoch-checkpoints", "--save-interval", "60"),
]
CUTS = {
    "words": ["--moses"],
    "sentencepiece": ["--moses", "--bpe", 60],
    "subword_nmt": ["--moses", "--bpe", 30, "--subwords", "subword-nmt"],
    "raw": ["--bpe", 60],
}


@pytest.fixture
def own(tmp_path, monkeypatch, capsys):
    """``own(*flags)``: the folder of a prepared corpus of PAIRS."""
    monkeypatch.setenv("LOWRANK_WORK", str(tmp_path / "work"))

    def make(*flags):
        words = ["own", "--name", "mine", "--source-lang", "de", "--target-lang", "en"]
        for split, times in (("train", 8), ("valid", 1), ("test", 1)):
            for side, language in enumerate(("de", "en")):
                text = "".join(f"{pair[side]}\n" for pair in PAIRS) * times
                (tmp_path / f"{split}.{language}").write_text(text, encoding="utf-8")
            words += [f"--{split}", str(tmp_path / split)]
        assert prepare([*words, *map(str, flags)]) == 0
        return tmp_path / "work" / "data" / "mine"

    return make


@pytest.fixture
def train(tmp_path, fairseq_command):
    """``train(data)``: a checkpoint of a tiny model that learnt PAIRS."""

    def run(data):
        arguments = ["--arch", "lowrank_transformer", "--attention", "mixhead-b", *SIZES, *TRAINING]
        fairseq_command("train", data, *arguments, "--save-dir", tmp_path / "run")
        return tmp_path / "run" / "checkpoint_last.pt"

    return run


@pytest.mark.parametrize("cut", CUTS)
def test_raw_text_is_translated_as_by_fairseq_generate(own, train, fairseq_command, capsys, tmp_path, cut):
    folder = own(*CUTS[cut])
    checkpoint = train(folder / "bin")
    join = ["--remove-bpe", "sentencepiece" if cut == "raw" else cut] if cut != "words" else []
    said = fairseq_command("generate", folder / "bin", "--path", checkpoint, "--cpu", "--beam", 3, *join)
    (tmp_path / "out").write_text(said, encoding="utf-8")
    tokens = read_run(tmp_path / "out").hypotheses
    expected = tokens if cut == "raw" else [MosesDetokenizer("en").detokenize(line.split()) for line in tokens]
    assert expected[0] == PAIRS[0][1]  # the model knows it by heart
    capsys.readouterr()
    assert cli.main(["translate", str(checkpoint), str(tmp_path / "test.de"), "--beam", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == expected


def test_six_roads_give_equal_translations(own, train, fairseq_command, capsys, tmp_path):
    """Of raw text, with a model whose subwords fairseq's commands can cut too."""
    transformers = pytest.importorskip("transformers")
    import fairseq_lowrank.huggingface  # noqa: F401

    data = own(*CUTS["raw"]) / "bin"
    checkpoint, texts = train(data), [german for german, _ in PAIRS]
    search = [data, "--path", checkpoint, "--cpu", "--beam", 3]
    pieces = {"bpe": "sentencepiece", "sentencepiece_model": str(data / "subwords.model")}

    def of_log(said):
        (tmp_path / "out").write_text(said, encoding="utf-8")
        return read_run(tmp_path / "out").hypotheses

    expected = of_log(fairseq_command("generate", *search, "--remove-bpe", "sentencepiece"))
    assert expected[0] == PAIRS[0][1]  # the model knows it by heart
    flags = ["--bpe", "sentencepiece", "--sentencepiece-model", pieces["sentencepiece_model"]]
    said = fairseq_command("interactive", *search, *flags, "--input", tmp_path / "test.de")
    assert re.findall(r"^D-\d+\t\S+\t(.*)$", said, re.MULTILINE) == expected
    hub = LowrankTransformerModel.from_pretrained(str(checkpoint.parent), checkpoint.name, str(data), **pieces)
    assert hub.translate(texts, beam=3) == expected
    assert list(Translator(checkpoint).translate(texts, beam=3)) == expected
    capsys.readouterr()
    assert cli.main(["translate", str(checkpoint), str(tmp_path / "test.de"), "--beam", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == expected
    folder = str(tmp_path / "exported")
    assert cli.main(["export", str(checkpoint), folder, "--to", "transformers", "--beam", "3"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    found = model.generate(**tokenizer(texts, return_tensors="pt", padding=True))
    assert tokenizer.batch_decode(found, skip_special_tokens=True) == expected


def test_standard_input_keeps_its_lines(own, train, monkeypatch, capsys):
    checkpoint = train(own(*CUTS["sentencepiece"]) / "bin")
    text = f"\ufeff{PAIRS[0][0]}\n\n{PAIRS[2][0][:9]}\u2028{PAIRS[2][0][9:]}\r\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="latin-1"))
    counts = []
    monkeypatch.setattr(Progress, "hide", lambda step: counts.append((step.label, step.done, step.total)))
    capsys.readouterr()
    assert cli.main(["translate", str(checkpoint)]) == 0
    assert counts == [("translating", 3, 3)]
    assert capsys.readouterr().out.splitlines() == [PAIRS[0][1], "", PAIRS[2][1]]


def test_settings_are_saved_with_old_data_too(own, tmp_path):
    folder = own(*CUTS["subword_nmt"])
    saved = json.loads((folder / "bin" / "text.json").read_text())
    assert saved == {"source": "de", "target": "en", "moses": {}, "subwords": "subword_nmt"}
    assert (folder / "bin" / "subwords.model").read_bytes() == (folder / "bpe.model").read_bytes()
    (folder / "bin" / "text.json").unlink()
    assert prepare(["mine"]) == 0
    assert json.loads((folder / "bin" / "text.json").read_text()) == saved


def test_data_of_others_needs_the_model_of_its_subwords(own, train, tmp_path):
    folder = own(*CUTS["sentencepiece"])
    checkpoint = train(folder / "bin")
    (folder / "bin" / "text.json").unlink()
    (folder / "bin" / "subwords.model").unlink()
    with pytest.raises(UserError, match=r"has subwords of sentencepiece.* Give it with --subwords FILE"):
        Translator(checkpoint)
    with pytest.raises(UserError, match="--subwords nothing: there is no such file"):
        Translator(checkpoint, subwords=Path("nothing"))
    translator = Translator(checkpoint, moses=True, subwords=folder / "bpe.model")
    assert list(translator.translate([german for german, _ in PAIRS])) == [english for _, english in PAIRS]
    shutil.move(folder / "bin", tmp_path / "moved")
    with pytest.raises(UserError, match="Give another one with --data"):
        Translator(checkpoint)
    translator = Translator(checkpoint, data=tmp_path / "moved", moses=True, subwords=folder / "bpe.model")
    assert list(translator.translate([])) == []


@pytest.mark.parametrize(("entry", "expected"), [("hund", "der hund läuft ."), ("Hund", "Der Hund läuft .")])
def test_text_is_lower_cased_if_the_dictionary_has_no_capitals(tmp_path, entry, expected):
    (tmp_path / "dict.de.txt").write_text(f"der 9\n{entry} 8\n")
    task = SimpleNamespace(cfg=SimpleNamespace(data=str(tmp_path), source_lang="de", target_lang="en"))
    assert raw_text(task, moses=True, subwords=None).encode("Der Hund läuft.") == expected
    assert raw_text(task, moses=False, subwords=None).encode("Der Hund läuft.") == "Der Hund läuft."


@pytest.mark.parametrize("kind", [*SUBWORDS.values(), WordPieces])
@pytest.mark.parametrize("content", [b"a line of text\n", b"\xff\xfe\x00", b"{"])
def test_a_model_of_subwords_that_is_something_else_is_named(kind, content, tmp_path, capsys):
    (tmp_path / "subwords").write_bytes(content)
    with pytest.raises(UserError, match=r"subwords .* Give the"):
        kind(tmp_path / "subwords")
    assert capsys.readouterr().err == ""


def test_translations_of_the_greatest_length_are_counted(trained, capsys):
    translator = Translator(trained("mixhead-a"))
    assert len(list(translator.translate(["", "one two"], longest=1))) == 2
    assert "1 of 2 translations have 1 tokens, the most that were allowed" in capsys.readouterr().err


def test_what_cannot_be_translated_is_refused(trained, translation_data, capsys, tmp_path):
    translator = Translator(trained("mixhead-a"))
    with pytest.raises(UserError, match=r"line 2 has 1,501 tokens, and the model allows 1,024\. Split the line"):
        next(translator.translate(["one", "word " * 1500]))
    (tmp_path / "long.txt").write_text("one\n" + "word " * 1500)
    assert cli.main(["translate", str(trained("mixhead-a")), str(tmp_path / "long.txt")]) == 2
    assert f"{tmp_path / 'long.txt'}: line 2 has 1,501 tokens" in capsys.readouterr().err
    with pytest.raises(UserError, match="is not a model of translation"):
        Translator(trained("mixhead-b"))
    with pytest.raises(UserError, match=r"--subwords .*: the words in .* are not cut"):
        Translator(trained("mixhead-a"), subwords=translation_data / "dict.de.txt")
    for words, message in (
        ([tmp_path / "no.de"], r"no\.de: there is no such file"),
        (["--beam", "0"], "--beam 0: expected a number >= 1"),
        (["--lenpen", "nan"], "--lenpen nan: expected a finite number"),
    ):
        assert cli.main(["translate", str(trained("mixhead-a")), *map(str, words)]) == 2
        assert re.search(message, capsys.readouterr().err)
