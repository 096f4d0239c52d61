"""IWSLT'14, from the campaign's files."""

import gzip

import pytest

from experiments.corpora.iwslt14 import TEST
from fairseq_lowrank.files import read_lines, write_lines


def test_the_iwslt14_test_set_is_the_five_chunks_in_order(prepare, corpus, tmp_path):
    data = corpus("ted-de-en")
    status, said = prepare("iwslt14", "--data", data, "--test-only")
    folder = tmp_path / "work" / "data" / "iwslt14"
    assert status == 0 and said == str(folder / "tok")
    german, english = (list(read_lines(folder / "tok" / f"test.{language}")) for language in ("de", "en"))
    assert len(german) == len(english) == 6750
    assert german[0].startswith("wissen sie , eines der großen vernügen beim reisen und")
    raw, start = list(read_lines(folder / "raw" / "test.en")), 0
    for chunk, count in zip(TEST, (887, 1165, 1565, 1433, 1700), strict=True):
        with gzip.open(data / f"IWSLT16.{chunk}.de-en.en.xml.gz", "rt") as file:
            first = next(line for line in file if "<seg" in line)
        assert f'<seg id="1"> {raw[start]} </seg>' == first.strip()
        start += count
    assert not any("<seg" in line or "&amp;" in line for line in raw)


def test_iwslt14_without_its_training_part_says_what_is_missing_and_whence(prepare, shorten, corpus, tmp_path):
    status, said = prepare("iwslt14", "--data", shorten(corpus("ted-de-en"), tmp_path / "data", IWSLT16=30))
    assert status == 2
    assert "lacks train.tags.de-en.de, train.tags.de-en.en" in said
    assert "--download to fetch them from http" in said and "--test-only" in said


@pytest.mark.parametrize("fetched", [False, True])
def test_iwslt14_from_the_campaigns_files(prepare, shorten, corpus, tmp_path, fetched):
    captions = {
        language: list(read_lines(corpus("multi30k") / f"train.{language}.gz"))[:460] for language in ("de", "en")
    }
    data = shorten(corpus("ted-de-en"), tmp_path / "data", IWSLT16=40)
    folder = tmp_path / "work" / "data" / "iwslt14"
    unpacked = folder / "download" / "de-en.tgz.d"
    unpacked.mkdir(parents=True)
    for language, lines in captions.items():
        tagged = [f"<url>http://a.b</url>\n<keywords>k</keywords>\n<talkid>1</talkid>\n<title>{lines[0]}</title>"]
        tagged += [f"<description>{lines[1]}</description>", *lines[2:]]
        if language == "de":
            tagged[10] = "zu lang " * 100
        # the test set may lie in --data where the training part was fetched
        write_lines((unpacked if fetched else data) / f"train.tags.de-en.{language}", tagged)
    download = ["--download"] if fetched else []
    status, _ = prepare("iwslt14", "--data", data, "--operations", 300, *download)
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
