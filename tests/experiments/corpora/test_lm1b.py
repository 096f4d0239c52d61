"""The One Billion Word benchmark."""

from fairseq_lowrank.files import read_lines, write_lines


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


def test_lm1b_can_be_tested_on_all_heldout_parts_and_then_validates_on_the_last_training_part(prepare, tmp_path):
    data = tmp_path / "data"
    for number in range(1, 100):
        write_lines(data / f"news.en-{number:05}-of-00100", [f"training {number}"])
    for number in range(50):
        write_lines(data / f"news.en.heldout-{number:05}-of-00050", [f"test {number}"])
    assert prepare("lm1b", "--data", data, "--all-heldout")[0] == 0
    text = tmp_path / "work" / "data" / "lm1b-all-heldout" / "tok"
    assert list(read_lines(text / "train.txt")) == [f"training {number}" for number in range(1, 99)]
    assert list(read_lines(text / "valid.txt")) == ["training 99"]
    assert list(read_lines(text / "test.txt")) == [f"test {number}" for number in range(50)]
