"""WMT'14, from the campaign's files."""

from experiments.corpora.wmt14 import TRAINING
from fairseq_lowrank.files import read_lines, write_lines


def test_wmt14_reads_the_campaigns_files(prepare, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for language, sentence in (("en", "A well-known house &amp; garden."), ("de", "Ein weithin bekanntes Haus.")):
        for part in TRAINING:
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
    assert len(list(read_lines(folder / "tok" / "train.de"))) == len(TRAINING)
    assert (folder / "bin" / "dict.en.txt").read_text() == (folder / "bin" / "dict.de.txt").read_text()
