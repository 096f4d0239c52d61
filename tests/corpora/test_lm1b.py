"""The One Billion Word benchmark."""

from fairseq_lowrank.corpora.text import read_lines, write_lines


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
