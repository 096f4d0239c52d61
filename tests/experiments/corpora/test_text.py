import gzip
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.corpora.text import BytePieces, SentencePiece, SubwordNMT, clean_pairs, join_lines, map_lines
from fairseq_lowrank.files import read_input, read_lines, whole_file, write_lines
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.raw_text import MosesTokenizer


def test_a_file_appears_only_when_it_is_complete(tmp_path):
    path = tmp_path / "folder" / "text"
    with pytest.raises(KeyboardInterrupt), whole_file(path) as file:
        file.write("half")
        raise KeyboardInterrupt
    assert list(path.parent.iterdir()) == []
    write_lines(path, ["whole"])
    assert [child.name for child in path.parent.iterdir()] == ["text"] and path.read_text() == "whole\n"


def test_only_a_newline_ends_a_line(tmp_path):
    lines = ["one\u2028still one", "two\x85", "", "three\x0c"]
    (tmp_path / "plain").write_bytes("\n".join([*lines, ""]).encode())
    (tmp_path / "packed.gz").write_bytes(gzip.compress("\r\n".join([*lines, ""]).encode()))
    assert list(read_lines(tmp_path / "plain")) == lines
    assert list(read_lines(tmp_path / "packed.gz")) == lines


def test_line_breaks_within_a_sentence_become_blanks(tmp_path, capsys):
    every = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
    assert all(len(f"a{sign}b".splitlines()) == 2 for sign in every)  # Python ends a line at no other sign
    write_lines(tmp_path / "text", ["one", f"a{'b'.join(every)}c", "two"])
    assert (tmp_path / "text").read_text("utf-8").splitlines() == ["one", "a" + " b" * 9 + " c", "two"]
    assert capsys.readouterr().err == f"{tmp_path / 'text'}: 10 line breaks within sentences are replaced by blanks\n"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_function_of_lines_gets_no_line_breaks(tmp_path, capsys, workers):
    (tmp_path / "raw").write_bytes("one\rstill one\u2028\ntwo\n".encode())
    map_lines(repr, tmp_path / "raw", tmp_path / "made", workers)
    assert list(read_lines(tmp_path / "made")) == ["'one still one '", "'two'"]
    assert "made: 2 line breaks" in capsys.readouterr().err


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name, pack in (("plain", bytes), ("packed.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack("\ufeffone\ntwo\ufeff\n".encode()))
        assert list(read_lines(tmp_path / name)) == ["one", "two\ufeff"]


def test_standard_input_is_read_like_a_file(monkeypatch):
    def give(data: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="latin-1"))

    give("\ufeffone\u2028\r\ntwo\rtwo\n".encode())
    assert list(read_input()) == ["one\u2028", "two\rtwo"]
    give(b"caf\xe9\n")
    with pytest.raises(UserError, match="standard input is not UTF-8"):
        list(read_input())


def test_several_processes_keep_the_order(tmp_path):
    lines = [f"Line {number}, isn't it?" for number in range(5000)]
    write_lines(tmp_path / "raw", lines)
    tokenizer = MosesTokenizer("en", lowercase=True)
    map_lines(tokenizer, tmp_path / "raw", tmp_path / "tokenised", workers=2)
    assert list(read_lines(tmp_path / "tokenised")) == [f"line {n} , isn &apos;t it ?" for n in range(5000)]


def test_moses_options():
    line = "„Well-known“\ttext:\u200bit's 3.5 & more."
    assert MosesTokenizer("en", escape=False)(line).endswith("it 's 3.5 & more .")
    assert MosesTokenizer("en")(line).endswith("it &apos;s 3.5 &amp; more .")
    normalised = MosesTokenizer("en", normalise=True, aggressive=True, escape=False)(line)
    assert normalised == '" Well @-@ known " text : it \'s 3.5 & more .'


def test_cleaning_keeps_pairs_of_like_length():
    pairs = [
        ("a", ""),
        ("a b", "a b c"),
        ("a b", "a b c d"),
        ("a b c", "a"),
        ("a b c d e", "a b c d"),
        ("a b c", "a b"),
    ]
    assert list(clean_pairs(pairs, longest=4, ratio=1.5)) == [("a b", "a b c"), ("a b c", "a b")]


@given(st.lists(st.text("ab", min_size=1), max_size=30), st.integers(1, 7))
def test_joining_keeps_every_line_in_order(lines, count):
    joined = list(join_lines(lines, count))
    assert " ".join(joined) == " ".join(lines)
    assert len(joined) == -(-len(lines) // count)


TEXT = ["the cat sat on the mat", "the cats sat on the mats", "a cat and a mat", "a bat sat"] * 5


@pytest.mark.parametrize("kind, size, joiner", [(SentencePiece, 22, "▁"), (SubwordNMT, 5, "@@ ")])
def test_pieces_join_to_the_text(tmp_path, kind, size, joiner):
    write_lines(tmp_path / "text", TEXT)
    kind.train([tmp_path / "text"], tmp_path / "model", size)
    encode = kind(tmp_path / "model")
    assert len(encode(TEXT[1]).split()) > len(TEXT[1].split())
    for line in TEXT:
        pieces = encode(line)
        joined = pieces.replace(joiner, "") if joiner == "@@ " else pieces.replace(" ", "").replace(joiner, " ").strip()
        assert joined == line


def test_merges_of_an_empty_text_are_refused(tmp_path):
    write_lines(tmp_path / "text", ["", ""])
    with pytest.raises(ValueError, match="cannot learn 9 merges"):
        SubwordNMT.train([tmp_path / "text"], tmp_path / "codes", 9)
    assert not (tmp_path / "codes").exists()


def test_byte_pieces_know_every_text(tmp_path):
    write_lines(tmp_path / "text", TEXT)
    BytePieces.train([tmp_path / "text"], tmp_path / "bytes", 257)
    encode = BytePieces(tmp_path / "bytes")
    assert encode("a mat") == "▁ a ▁ m a t"
    assert encode("日本") == "▁ " + " ".join(chr(256 + byte) for byte in "日本".encode())
    BytePieces.train([tmp_path / "text"], tmp_path / "more", 262)
    assert len(BytePieces(tmp_path / "more")("the mat").split()) < len(encode("the mat").split())
    with pytest.raises(ValueError, match="cannot learn 256 pieces"):
        BytePieces.train([tmp_path / "text"], tmp_path / "few", 256)
    assert not (tmp_path / "few").exists()
