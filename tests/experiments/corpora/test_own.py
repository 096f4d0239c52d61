"""Text of your own as a corpus, and data that somebody else binarised."""

import gzip

import pytest

from experiments.corpora.catalogue import parse_corpus_name
from experiments.corpora.own import check_binarised
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
