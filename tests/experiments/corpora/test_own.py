"""Text of your own as a corpus, and data that somebody else binarised."""

import gzip
import shutil
from argparse import Namespace

import pytest

from experiments.corpora.__main__ import main
from experiments.corpora.catalogue import parse_corpus_name
from experiments.corpora.own import check_binarised, sources
from fairseq_lowrank.files import read_lines, write_lines
from fairseq_lowrank.messages import UserError

LINES = {"de": "Ein kleiner Hund läuft .", "en": "A small dog is running ."}
PARALLEL = ("--source-lang", "de", "--target-lang", "en")


@pytest.fixture
def text(tmp_path):
    """A folder with SPLIT.de and SPLIT.en, and flags that name them."""
    folder = tmp_path / "text"
    folder.mkdir()
    for split, count in {"train": 40, "valid": 4, "test": 4}.items():
        for language, line in LINES.items():
            (folder / f"{split}.{language}").write_text("".join(f"{line} {n % 5}\n" for n in range(count)))
    return folder, [word for split in ("train", "valid", "test") for word in (f"--{split}", folder / split)]


@pytest.mark.parametrize(
    ("flags", "undone", "piece"),
    [
        ([], None, "kleiner"),
        (["--bpe", 40], "sentencepiece", "▁"),
        (["--bpe", 10, "--subwords", "subword-nmt"], "subword_nmt", "@@"),
    ],
)
def test_own_text_becomes_a_corpus_of_its_name(prepare, text, tmp_path, flags, undone, piece):
    _, files = text
    status, said = prepare("own", "--name", "mine", *PARALLEL, *files, *flags)
    made = tmp_path / "work" / "data" / "mine"
    assert (status, said) == (0, str(made / "bin"))
    assert (made / "bin" / "train.de-en.de.bin").exists()
    assert piece in (made / ("bpe" if undone else "tok") / "train.de").read_text()
    corpus, values = parse_corpus_name("mine")
    assert corpus.bpe_to_remove(values) == undone and corpus.training(values) == list(PARALLEL)
    assert prepare("mine") == (0, said)


def test_number_of_subwords_that_cannot_be_learned_may_be_replaced(prepare, text, tmp_path):
    command = ("own", "--name", "mine", *PARALLEL, *text[1])
    status, said = prepare(*command, "--bpe", 4000)
    assert status == 2 and "cannot learn 4000 pieces" in said
    status, said = prepare(*command, "--bpe", 40, "--moses")
    assert status == 2 and "was made with no --moses" in said
    assert prepare(*command, "--bpe", 40)[0] == 0
    assert parse_corpus_name("mine")[1]["bpe"] == 40
    status, said = prepare(*command, "--bpe", 41)
    assert status == 2 and "was made with --bpe 40, not with --bpe 41" in said


def test_a_corpus_of_texts_that_have_changed_is_refused(prepare, text, tmp_path):
    folder, files = text
    command = ("own", "--name", "mine", *PARALLEL, *files)
    assert prepare(*command)[0] == 0
    (folder / "test.de").write_text((folder / "test.de").read_text().replace("Ein", "Kein"))
    for again in (command, ("mine",)):
        status, said = prepare(*again)
        assert status == 2 and f"{folder / 'test.de'}: changed since" in said
    (folder / "test.de").unlink()
    assert prepare("mine")[0] == 0


def test_files_are_looked_for_in_the_folder_of_the_data(text):
    folder, _ = text
    splits = {split: split for split in ("train", "valid", "test")}
    found = sources(Namespace(source_lang="de", target_lang="en", data=folder, data_given=True, **splits))
    assert found == {f"{split}.{language}": folder / f"{split}.{language}" for split in splits for language in LINES}


def test_own_text_of_a_language_model_is_a_file_a_split(prepare, tmp_path):
    files = []
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.gz").write_bytes(gzip.compress(b"some words\n" * 9))
        files += [f"--{split}", tmp_path / f"{split}.gz"]
    assert prepare("own", "--name", "mine", *files)[0] == 0
    assert (tmp_path / "work/data/mine/bin/dict.txt").exists()
    corpus, values = parse_corpus_name("mine")
    assert corpus.training(values) == ["--task", "language_modeling"]


def test_raw_text_is_tokenised_by_moses(prepare, text, tmp_path):
    folder, files = text
    (folder / "test.en").write_text("It isn't here.\n" * 4)
    assert prepare("own", "--name", "mine", *PARALLEL, *files, "--moses")[0] == 0
    tokens = next(read_lines(tmp_path / "work/data/mine/tok/test.en"))
    assert tokens == "It isn &apos;t here ."
    assert next(read_lines(tmp_path / "work/data/mine/raw/test.en")) == "It isn't here."


@pytest.mark.parametrize("flags", [[], ["--moses"], ["--bpe", 40], ["--workers", 2]])
def test_line_breaks_and_byte_order_marks_shift_no_pair(prepare, text, tmp_path, flags):
    from fairseq.data import indexed_dataset

    folder, files = text
    for language, place in (("de", 1), ("en", 3)):
        lines = [f"{language} {number}" for number in range(13)]
        lines[place] = lines[place].replace(" ", "\r") + "\u2028end\x85"
        (folder / f"train.{language}").write_bytes("\n".join(["\ufeff" + lines[0], *lines[1:], ""]).encode())
    assert prepare("own", "--name", "mine", *PARALLEL, *files, *flags)[0] == 0
    made = tmp_path / "work" / "data" / "mine"
    sides = [(made / "tok" / f"train.{language}").read_text("utf-8").splitlines() for language in ("de", "en")]
    assert [line.split()[:2] for line in sides[0]] == [["de", str(number)] for number in range(13)]
    assert [line.split()[:2] for line in sides[1]] == [["en", str(number)] for number in range(13)]
    for language in ("de", "en"):
        assert len(indexed_dataset.make_dataset(str(made / "bin" / f"train.de-en.{language}"), "mmap")) == 13


def test_binarised_text_with_another_number_of_sentences_is_refused(prepare, text, tmp_path):
    _, files = text
    assert prepare("own", "--name", "mine", *PARALLEL, *files)[0] == 0
    made = tmp_path / "work" / "data" / "mine"
    shutil.rmtree(made / "bin")
    for language in LINES:  # both sides have the same number of lines, and of pieces between line breaks
        (made / "tok" / f"train.{language}").write_bytes(b"one\rtwo\n" + b"three\n" * 39)
    status, said = prepare("own", "--name", "mine", *PARALLEL, *files)
    assert status == 2 and "train.de: 40 lines became 41 sentences" in said
    assert not (made / "bin").exists()


def test_the_numbers_of_a_corpus_are_printed(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LOWRANK_WORK", str(tmp_path / "work"))
    folder, files = text
    (folder / "valid.de").write_text("Ein Hund\n\n" + "Ein " * 1024 + "\nKatze läuft\n")
    assert main(["own", "--name", "mine", *PARALLEL, *map(str, files)]) == 0
    *_, train, valid, _ = capsys.readouterr().err.splitlines()
    assert train == "train: 40 pairs, 0 empty, longest 7 tokens, 0 above 1,024, 0 of 520 tokens unknown"
    assert valid == "valid: 4 pairs, 1 empty, longest 1,024 tokens, 1 above 1,024, 1 of 1,056 tokens unknown"


@pytest.mark.parametrize("fault", ["lines", "missing", "bytes", "language", "name", "empty"])
def test_text_that_is_no_corpus_is_refused_in_one_line(prepare, text, tmp_path, fault):
    folder, files = text
    flags, name = list(PARALLEL), "mine"
    if fault == "lines":
        (folder / "valid.de").write_text("one\n")
        expected = f"--valid {folder / 'valid'}: 1 lines of de and 4 lines of en"
    elif fault == "missing":
        (folder / "test.en").unlink()
        expected = f"--test {folder / 'test'}: {folder / 'test.en'} is not a file"
    elif fault == "bytes":
        (folder / "train.en").write_bytes(b"caf\xe9\n" * 40)
        expected = f"--train {folder / 'train'}: {folder / 'train.en'} is not UTF-8"
    elif fault == "language":
        flags, expected = ["--source-lang", "de"], "--source-lang and --target-lang: one is missing"
    elif fault == "name":
        name, expected = "brown", "--name brown: another corpus has this name"
    else:
        for language in LINES:
            (folder / f"test.{language}").write_text("")
        expected = f"--test {folder / 'test'}: 0 lines"
    status, said = prepare("own", "--name", name, *flags, *files)
    assert status == 2 and expected in said
    assert not (tmp_path / "work" / "data" / name / "bin").exists()


def test_a_path_is_a_corpus_of_binarised_data(tmp_path, translation_data):
    corpus, values = parse_corpus_name(str(translation_data))
    assert corpus.variant_name(values) == str(translation_data) and corpus.bpe_to_remove(values) is None
    check_binarised(translation_data)
    with pytest.raises(UserError, match=f"CORPUS {tmp_path}"):
        check_binarised(tmp_path)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (["▁the 9", "▁a 8", "do 7", "g 6"], "sentencepiece"),
        (["the 9", "do@@ 8", "g 7"], "subword_nmt"),
        (["the 9", "dog 8", "@@ 7", "▁x 1"] + [f"word{n} 1" for n in range(200)], None),
    ],
)
def test_a_dictionary_shows_how_words_were_cut(tmp_path, entries, expected):
    write_lines(tmp_path / "dict.en.txt", entries)
    corpus, values = parse_corpus_name(str(tmp_path))
    assert corpus.bpe_to_remove(values) == expected
