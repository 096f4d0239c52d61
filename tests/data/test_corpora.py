"""Preparing corpora, on the real ones as far as they are here."""

import gzip
import hashlib
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from fairseq_lowrank.data import corpora
from fairseq_lowrank.data.fetch import locked
from fairseq_lowrank.data.text import read_lines, write_lines


@pytest.fixture
def prepare(tmp_path, monkeypatch, capsys):
    """``prepare(corpus, …)``: run the command; returns its exit status and its last line."""
    monkeypatch.setenv("LOWRANK_WORK", str(tmp_path / "work"))
    monkeypatch.delenv("LOWRANK_DATA", raising=False)

    def run(*arguments) -> tuple[int, str]:
        status = corpora.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, (captured.out if status == 0 else captured.err).splitlines()[-1]

    return run


def shorten(source: Path, target: Path, **lines: int) -> Path:
    """Copy the first lines of files: `shorten(a, b, train=100)` copies 100 lines of each `train*`."""
    target.mkdir(exist_ok=True)
    for name, count in lines.items():
        for file in source.glob(f"{name}*"):
            head = list(read_lines(file))[:count]
            (target / file.name).write_bytes(gzip.compress("".join(f"{line}\n" for line in head).encode()))
    return target


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_multi30k_becomes_a_fairseq_corpus_and_goes_on_where_it_stopped(prepare, corpus, tmp_path):
    data = shorten(corpus("multi30k"), tmp_path / "data", train=300, val=50, test=40)
    status, said = prepare("multi30k", "--data", data, "--pieces", 300)
    assert status == 0
    folder = tmp_path / "work" / "data" / "multi30k"
    assert said == str(folder / "bin")
    assert next(read_lines(folder / "tok" / "train.en")) == "two young , white males are outside near many bushes ."
    assert (folder / "bin" / "dict.de.txt").read_text() == (folder / "bin" / "dict.en.txt").read_text()
    pieces = list(read_lines(folder / "bpe" / "test.de"))
    assert [line.replace(" ", "").replace("▁", " ").strip() for line in pieces] == list(
        read_lines(folder / "tok" / "test.de")
    )

    before = files(folder)
    assert prepare("multi30k", "--data", tmp_path / "gone", "--pieces", 300) == (0, str(folder / "bin"))
    assert files(folder) == before
    # An interrupted run left neither the last step nor one of the files before it.
    for path in [*(folder / "bin").iterdir(), folder / "bpe" / "valid.en"]:
        path.unlink()
    (folder / "bin").rmdir()
    assert prepare("multi30k", "--data", data, "--pieces", 300)[0] == 0
    after = files(folder)
    changed = {path.relative_to(folder).parts[0] for path in before if after[path] != before[path]}
    assert changed == {"bin", "bpe"} and after[folder / "bpe" / "valid.de"] == before[folder / "bpe" / "valid.de"]


def test_a_second_process_waits_for_the_first_and_takes_what_it_made(prepare, corpus, tmp_path):
    data = shorten(corpus("brown"), tmp_path / "data", train=50, valid=20, test=20)
    command = [sys.executable, "-m", "fairseq_lowrank.data.corpora", "brown", "--data", str(data)]
    folder = tmp_path / "work" / "data" / "brown"
    with locked(folder):
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        assert all("waiting for another process" in process.stderr.readline() for process in both)
    made = []
    for process in both:
        output, errors = process.communicate()
        assert (process.returncode, Path(output.rstrip("\n"))) == (0, folder / "bin"), errors
        made.append("making" in errors)
    assert sorted(made) == [False, True]


def test_joined_sentences_share_the_dictionaries(prepare, corpus, tmp_path):
    data = shorten(corpus("multi30k"), tmp_path / "data", train=105, val=20, test=20)
    assert prepare("multi30k", "--data", data, "--pieces", 200, "--join", 10)[0] == 0
    single, joined = tmp_path / "work" / "data" / "multi30k", tmp_path / "work" / "data" / "multi30k-x10"
    lines = list(read_lines(single / "bpe" / "train.de"))
    assert list(read_lines(joined / "bpe" / "train.de"))[1] == " ".join(lines[10:20])
    assert len(list(read_lines(joined / "tok" / "train.en"))) == 11
    assert (joined / "bin" / "dict.en.txt").read_text() == (single / "bin" / "dict.en.txt").read_text()

    shutil.rmtree(single)  # as the refusal of other pieces says, which holds for the joined folder too
    status, said = prepare("multi30k", "--data", data, "--pieces", 250, "--join", 10)
    assert status == 2 and f"{joined} was made with --pieces 200, not with --pieces 250" in said


def test_a_folder_made_with_other_settings_is_refused_even_half_made(prepare, corpus, tmp_path):
    data = shorten(corpus("multi30k"), tmp_path / "data", train=105, val=20, test=20)
    assert prepare("multi30k", "--data", data, "--pieces", 200)[0] == 0
    folder = tmp_path / "work" / "data" / "multi30k"
    refused = (
        2,
        f"prepare_multi30k.sh: error: {folder} was made with --pieces 200, not with --pieces 6000: give --pieces 200, or "
        "remove that folder",
    )
    assert prepare("multi30k", "--data", data) == refused
    shutil.rmtree(folder / "bin")  # as after an interruption
    assert prepare("multi30k", "--data", data) == refused
    (folder / "settings.json").unlink()  # as made by an earlier version, which is taken for the default
    assert "was made with --pieces 6000, not with --pieces 200" in prepare("multi30k", "--pieces", 200)[1]
    assert prepare("multi30k", "--data", data)[0] == 0


def test_settings_that_a_folders_name_tells_are_checked_where_it_is_named_otherwise(prepare, corpus, tmp_path):
    data = shorten(corpus("brown"), tmp_path / "data", train=20, valid=20, test=20)
    both = ("--data", data, "--output", tmp_path / "out")
    assert prepare("brown", *both)[0] == 0
    assert "out was made with no --head, not with --head 7: give no --head" in prepare("brown", *both, "--head", 7)[1]
    (tmp_path / "out" / "settings.json").unlink()
    assert prepare("brown", *both, "--head", 7) == (0, str(tmp_path / "out" / "bin"))


def test_the_iwslt14_test_set_is_the_five_chunks_in_order(prepare, corpus, tmp_path):
    data = corpus("ted-de-en")
    status, said = prepare("iwslt14", "--data", data, "--test-only")
    folder = tmp_path / "work" / "data" / "iwslt14"
    assert status == 0 and said == str(folder / "tok")
    german, english = (list(read_lines(folder / "tok" / f"test.{language}")) for language in ("de", "en"))
    assert len(german) == len(english) == 6750
    assert german[0].startswith("wissen sie , eines der großen vernügen beim reisen und")
    raw, start = list(read_lines(folder / "raw" / "test.en")), 0
    for chunk, count in zip(corpora.IWSLT14_TEST, (887, 1165, 1565, 1433, 1700), strict=True):
        with gzip.open(data / f"IWSLT16.{chunk}.de-en.en.xml.gz", "rt") as file:
            first = next(line for line in file if "<seg" in line)
        assert f'<seg id="1"> {raw[start]} </seg>' == first.strip()
        start += count
    assert not any("<seg" in line or "&amp;" in line for line in raw)


def test_iwslt14_without_its_training_part_says_what_is_missing_and_whence(prepare, corpus, tmp_path):
    status, said = prepare("iwslt14", "--data", shorten(corpus("ted-de-en"), tmp_path / "data", IWSLT16=30))
    assert status == 2
    assert "lacks train.tags.de-en.de, train.tags.de-en.en" in said
    assert "--download from http" in said and "--test-only" in said


def test_a_missing_corpus_leaves_no_folder_behind(prepare, tmp_path):
    status, said = prepare("brown", "--data", tmp_path / "none")
    assert status == 2 and f"{tmp_path}/none lacks train.txt or cr09" in said
    assert not (tmp_path / "work" / "data" / "brown").exists()


def test_iwslt14_from_the_campaigns_files(prepare, corpus, tmp_path):
    captions = {
        language: list(read_lines(corpus("multi30k") / f"train.{language}.gz"))[:460] for language in ("de", "en")
    }
    data = shorten(corpus("ted-de-en"), tmp_path / "data", IWSLT16=40)
    for language, lines in captions.items():
        tagged = [f"<url>http://a.b</url>\n<keywords>k</keywords>\n<talkid>1</talkid>\n<title>{lines[0]}</title>"]
        tagged += [f"<description>{lines[1]}</description>", *lines[2:]]
        if language == "de":
            tagged[10] = "zu lang " * 100
        write_lines(data / f"train.tags.de-en.{language}", tagged)
    status, _ = prepare("iwslt14", "--data", data, "--operations", 300)
    folder = tmp_path / "work" / "data" / "iwslt14"
    assert status == 0
    valid, train = (list(read_lines(folder / "tok" / f"{split}.en")) for split in ("valid", "train"))
    pairs = zip(*(read_lines(folder / "tok" / f"all.{language}") for language in ("de", "en")), strict=True)
    kept = [
        en for de, en in pairs if max(len(de.split()), len(en.split())) <= 1.5 * min(len(de.split()), len(en.split()))
    ]
    assert valid == kept[22::23] and train == [line for n, line in enumerate(kept, 1) if n % 23]
    assert "http" not in " ".join(train) and "<" not in " ".join(train)
    dictionaries = [(folder / "bin" / f"dict.{language}.txt").read_text() for language in ("de", "en")]
    assert dictionaries[0] != dictionaries[1]
    assert "@@" in dictionaries[0]


def test_wmt14_reads_the_campaigns_files(prepare, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for language, sentence in (("en", "A well-known house &amp; garden."), ("de", "Ein weithin bekanntes Haus.")):
        for part in corpora.WMT14_TRAINING:
            text = sentence.replace("&amp;", "and")
            write_lines(
                data / f"{part}.{language}", [f"{part} {text}", "", text if language == "de" else f"{text} {text}"]
            )
        for name in ("newstest2013", "newstest2014-deen"):
            kind = "src" if language == "en" else "ref"
            write_lines(data / f"{name}-{kind}.{language}.sgm", ["<doc>", f'<seg id="1">{sentence}</seg>', "</doc>"])
    assert prepare("wmt14", "--data", data, "--operations", 5)[0] == 0
    folder = tmp_path / "work" / "data" / "wmt14"
    assert list(read_lines(folder / "tok" / "test.en")) == ["A well @-@ known house &amp; garden ."]
    assert list(read_lines(folder / "raw" / "test.en")) == ["A well-known house & garden."]
    # An empty pair and one of too different lengths are gone.
    assert len(list(read_lines(folder / "tok" / "train.de"))) == len(corpora.WMT14_TRAINING)
    assert (folder / "bin" / "dict.en.txt").read_text() == (folder / "bin" / "dict.de.txt").read_text()


def test_language_models_in_words_and_in_pieces(prepare, corpus, tmp_path):
    data = shorten(corpus("brown"), tmp_path / "data", train=200, valid=20, test=20)
    assert prepare("brown", "--data", data)[0] == 0
    assert prepare("brown", "--data", data, "--pieces", 300)[0] == 0
    assert prepare("brown", "--data", data, "--head", 7)[0] == 0
    head = tmp_path / "work" / "data" / "brown-head7" / "tok" / "train.txt"
    assert list(read_lines(head)) == list(read_lines(data / "train.txt.gz"))[:7]
    words, pieces = tmp_path / "work" / "data" / "brown", tmp_path / "work" / "data" / "brown-bpe300"
    counts = dict(line.split() for line in read_lines(words / "bin" / "dict.txt"))
    assert int(counts["the"]) > 100
    assert {len(line.split()) for line in read_lines(pieces / "bin" / "dict.txt")} == {2}
    assert len(list(read_lines(pieces / "bin" / "dict.txt"))) <= 300
    first = next(read_lines(pieces / "bpe" / "test.txt"))
    assert first.replace(" ", "").replace("▁", " ").strip() == next(read_lines(data / "test.txt.gz"))


def test_brown_from_nltks_copy_is_split_by_document(prepare, tmp_path):
    data = tmp_path / "data" / "brown"
    names = [f"c{letter}{number:02}" for letter in "abcdefghijklmnopqr" for number in range(1, 29)][-500:]
    for number, name in enumerate(sorted(names)):
        write_lines(data / name, ["", f"\tNumber/nn-hl {number}/cd and/or/cc ./.", f"end{number % 7}/nn"])
    assert prepare("brown", "--data", data)[0] == 0
    folder = tmp_path / "work" / "data" / "brown" / "tok"
    test, valid, train = (list(read_lines(folder / f"{split}.txt")) for split in ("test", "valid", "train"))
    assert test[:4] == ["Number 7 and/or .", "end0", "", "Number 27 and/or ."] and len(test) == 25 * 3
    assert valid[0].startswith("Number 13 ") and len(valid) == 25 * 3 and len(train) == 450 * 3
    (data / "cr01").unlink()
    status, said = prepare("brown", "--data", data, "--output", tmp_path / "other")
    assert status == 2 and "499 of the Brown corpus's 500 documents" in said


def test_wikitext_takes_the_published_names(prepare, corpus, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    lines = list(read_lines(corpus("wikitext-2") / "valid.txt.gz"))[:60]
    for split in ("train", "valid", "test"):
        write_lines(data / f"wiki.{split}.tokens", lines)
    assert prepare("wikitext", "--size", 2, "--data", data)[0] == 0
    assert list(read_lines(tmp_path / "work" / "data" / "wikitext-2" / "tok" / "test.txt")) == lines
    status, said = prepare("wikitext", "--size", 103, "--data", corpus("wikitext-2"))
    assert status == 2 and "wiki.train.tokens or train.txt" in said and "wikitext-103-v1.zip" in said

    write_lines(data / "wiki.train.tokens", ["word"] * 36_718)
    status, said = prepare("wikitext", "--size", 103, "--data", data, "--head", 5)
    assert status == 2 and said.endswith("wiki.train.tokens has the 36,718 lines of WikiText-2")
    write_lines(data / "wiki.test.tokens", ["", " "])
    status, said = prepare("wikitext", "--size", 2, "--data", data, "--head", 5)
    assert status == 2 and said.endswith("wiki.test.tokens: no text for test")
    assert not (tmp_path / "work" / "data" / "wikitext-2-head5").exists()


@pytest.mark.parametrize("flags", [("--head", "0"), ("--head", "-1"), ("--workers", "0"), ("--pieces", "many")])
def test_numbers_below_one_are_refused(prepare, flags, capsys):
    with pytest.raises(SystemExit):
        prepare("brown", *flags)
    assert f"argument {flags[0]}: {flags[1]}: expected a whole number, at least 1" in capsys.readouterr().err


def test_lm1b_keeps_words_seen_three_times(prepare, tmp_path):
    data = tmp_path / "data" / "training"
    for number in range(1, 100):
        write_lines(data / f"news.en-{number:05}-of-00100", ["often here", *(["rare"] * (number < 3))])
    write_lines(data / "news.en.heldout-00000-of-00050", ["often test"])
    write_lines(data / "news.en.heldout-00001-of-00050", ["often valid"])
    assert prepare("lm1b", "--data", data)[0] == 0
    folder = tmp_path / "work" / "data" / "lm1b"
    words = {line.split()[0] for line in read_lines(folder / "bin" / "dict.txt")}
    assert {"often", "here"} <= words and "rare" not in words
    assert list(read_lines(folder / "tok" / "test.txt")) == ["often test"]
    (data / "news.en-00042-of-00100").unlink()
    assert "lacks news.en-00042-of-00100." in prepare("lm1b", "--data", data, "--output", tmp_path / "other")[1]


def archive(folder: Path) -> Path:
    source = folder / "wiki.train.raw"
    write_lines(source, ["text"])
    with tarfile.open(folder / "corpus.tgz", "w:gz") as file:
        file.add(source, "corpus/wiki.train.raw")
    return folder / "corpus.tgz"


def test_a_download_with_an_unknown_checksum_is_refused_until_it_is_accepted(tmp_path):
    from fairseq_lowrank.data.fetch import gather

    packed = archive(tmp_path)
    found = hashlib.sha256(packed.read_bytes()).hexdigest()
    args = corpora.build_parser().parse_args(["brown", "--data", str(tmp_path / "none"), "--download"])
    args.output = tmp_path / "out"
    urls = {packed.as_uri(): None}
    with pytest.raises(ValueError, match=f"--sha256 {found}"):
        gather(args, ["wiki.train.raw"], urls)
    assert not (args.output / "download" / "corpus.tgz").exists()
    packed.unlink()  # it is not fetched a second time
    args.sha256 = [found]
    assert gather(args, ["wiki.train.raw"], urls)[0].read_text() == "text\n"


def test_a_download_that_differs_from_its_known_checksum_is_refused(tmp_path):
    from fairseq_lowrank.data.fetch import download

    with pytest.raises(ValueError, match="not a checksum known here"):
        download(archive(tmp_path).as_uri(), tmp_path / "out" / "corpus.tgz", ["0" * 64])
    assert not (tmp_path / "out" / "corpus.tgz").exists()


def test_sides_of_different_length_are_refused(tmp_path):
    write_lines(tmp_path / "de", ["eins", "zwei"])
    write_lines(tmp_path / "en", ["one"])
    with pytest.raises(ValueError, match="do not have equally many lines"):
        list(corpora.read_pairs(tmp_path / "de", tmp_path / "en"))


@pytest.mark.parametrize("name", sorted(corpora.CORPORA))
def test_help_says_what_a_script_takes(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        corpora.main([name, "--help"])
    said = capsys.readouterr().out
    assert stopped.value.code == 0 and "--data" in said and "--download" in said
