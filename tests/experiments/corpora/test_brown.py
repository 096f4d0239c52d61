"""The Brown corpus, from NLTK's copy or a part of it."""

from fairseq_lowrank.files import read_lines, write_lines


def test_language_models_in_words_and_in_pieces(prepare, shorten, corpus, tmp_path):
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
