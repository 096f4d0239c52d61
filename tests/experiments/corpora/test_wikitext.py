"""WikiText, as it was published."""

from fairseq_lowrank.files import read_lines, write_lines


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
    assert status == 2 and "wiki.train.tokens has the 36,718 lines of WikiText-2" in said
    write_lines(data / "wiki.test.tokens", ["", " "])
    status, said = prepare("wikitext", "--size", 2, "--data", data, "--head", 5)
    assert status == 2 and "wiki.test.tokens: no text for test" in said
    assert not (tmp_path / "work" / "data" / "wikitext-2-head5").exists()


def test_a_formula_within_text_is_no_title(prepare, tmp_path):
    text = [
        "",
        " = One = ",
        "",
        " text ",
        " = 1 and a k = ",
        " more ",
        "",
        " = = Part = = ",
        "",
        " end ",
        "",
        " = Two = ",
        "",
        " x ",
    ]
    for split in ("train", "valid", "test"):
        write_lines(tmp_path / "data" / f"wiki.{split}.tokens", text)
    assert prepare("wikitext-2-documents", "--data", tmp_path / "data")[0] == 0
    made = "\n".join(read_lines(tmp_path / "work" / "data" / "wikitext-2-documents" / "tok" / "train.txt"))
    assert [part.split("\n")[0] for part in made.split("\n\n")] == [" = One = ", " = Two = "]


def test_documents_are_articles(prepare, corpus, tmp_path):
    lines = list(read_lines(corpus("wikitext-2") / "valid.txt.gz"))[:132]
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "valid", "test"):
        write_lines(data / f"wiki.{split}.raw", lines)
    assert prepare("wikitext-2-documents-bpe300", "--data", data)[0] == 0
    made = list(read_lines(tmp_path / "work" / "data" / "wikitext-2-documents-bpe300" / "tok" / "train.txt"))
    assert [line for line in made if line] == [line for line in lines if line.strip()]
    documents = "\n".join(made).split("\n\n")
    assert len(documents) == 4 and made[-1] == ""
    titles = [document.strip().splitlines()[0].split() for document in documents]
    assert all(title[0] == "=" and title[1] != "=" for title in titles)
