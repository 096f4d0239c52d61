"""Multi30k, and sentences of it joined."""

import shutil
from pathlib import Path

from fairseq_lowrank.files import read_lines


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_multi30k_becomes_a_fairseq_corpus_and_goes_on_where_it_stopped(prepare, shorten, corpus, tmp_path):
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


def test_joined_sentences_share_the_dictionaries(prepare, shorten, corpus, tmp_path):
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


def test_what_was_begun_from_one_folder_does_not_go_on_from_another(prepare, shorten, corpus, tmp_path):
    one = shorten(corpus("multi30k"), tmp_path / "one", train=105, val=20, test=20)
    other = shorten(corpus("multi30k"), tmp_path / "other", train=90, val=10, test=10)
    damaged = next(one.glob("val*en.gz"))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:40])
    assert prepare("multi30k", "--data", one, "--pieces", 200)[0] == 2
    refused = f"was begun from {one}, not from {other}. Add --data {one}, or remove "
    assert refused in prepare("multi30k", "--data", other, "--pieces", 200)[1]
    damaged.write_bytes(whole)
    # and joined sentences are of what they are made from, whatever is said of --data
    for arguments in (["multi30k", "--data", one], ["multi30k-x2"], ["multi30k-x2", "--data", one]):
        assert prepare(*arguments, "--pieces", 200)[0] == 0
    assert refused in prepare("multi30k-x2", "--data", other, "--pieces", 200)[1]
