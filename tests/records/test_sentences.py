"""Values of sentences are in a compressed file next to a results file."""

import gzip
import json
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from fairseq_lowrank import cli
from fairseq_lowrank.records import results, sentences

LINE = {"row": "a", "seed": 1, "metric": "accuracy", "value": 50.0}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "mine.jsonl"


def read(path, said):
    return results.read_results(path, said.append, scores=True, sentences=True)


def append(path, seed):
    results.append_score(path, LINE | {"seed": seed, "sentence_values": [seed] * 5000})


def test_values_go_to_the_compressed_file_and_come_back(path):
    losses = {"fit": {"bits": 1.5, "sentence_values": [1.25, 1.75]}, "test": {"bits": 2.0}}
    line = LINE | {"sentence_counts": [[1] * 10] * 3, "losses": losses}
    results.append_score(path, line)
    (kept,) = results.read_results(path, scores=True)
    assert kept == LINE | {"losses": {"fit": {"bits": 1.5, "sentences": 2}, "test": {"bits": 2.0}}, "sentences": 3}
    said = []
    (found,) = read(path, said)
    assert found["sentence_counts"] == line["sentence_counts"] and not said
    assert found["losses"]["fit"] == losses["fit"] | {"sentences": 2}


def test_a_line_without_values_makes_no_compressed_file(path):
    results.append_score(path, LINE)
    assert not sentences.sentences_file(path).exists()


def test_lines_of_several_processes_keep_their_values(path):
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(append, [path] * 12, range(12)))
    said = []
    assert {line["seed"]: line["sentence_values"][-1] for line in read(path, said)} == {n: n for n in range(12)}
    assert not said


def test_the_same_lines_give_the_same_bytes(path):
    files = [path, path.with_name("other.jsonl")]
    for file in files:
        for seed in (1, 2):
            append(file, seed)
    first, second = (sentences.sentences_file(file).read_bytes() for file in files)
    assert first == second


def test_a_line_that_is_appended_again_has_its_own_values(path):
    for values in ([1, 2], [3, 4]):
        results.append_line(path, LINE | {"sentence_values": values})
    assert [line.get("sentence_values") for line in read(path, [])] == [None, [3, 4]]


def test_values_in_the_line_itself_are_still_read(path):
    append(path, 2)
    with path.open("a") as file:
        file.write(json.dumps(LINE | {"sentence_values": [7]}) + "\n")
    assert [line["sentence_values"][0] for line in read(path, [])] == [2, 7]


def test_compare_explains_a_missing_file_and_leaves_sentences_out(path, capsys):
    for row, value in (("a", 1), ("b", 0)):
        results.append_score(path, LINE | {"row": row, "value": value, "sentence_values": [value] * 3})
    words = ["compare", str(path), "--pair", "a", "b", "--json"]
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out)[0]["sentences"] == 3
    sentences.sentences_file(path).unlink()
    assert cli.main(words) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)[0]["mean"] == 1 and json.loads(printed.out)[0]["sentences"] == 1
    assert (
        printed.err.count("\n") == 1 and "mine.sentences.gz does not exist" in printed.err and "Copy it" in printed.err
    )


@pytest.mark.parametrize("record", [{}, LINE | {"sentence_values": [1]}])
def test_values_of_another_line_are_left_out(path, record):
    results.append_score(path, LINE | {"sentence_values": [1, 2]})
    sentences.sentences_file(path).write_bytes(gzip.compress(json.dumps(record).encode() + b"\nnone\n"))
    said = []
    assert "sentence_values" not in read(path, said)[0]
    assert "line 2: not a record" in said[0] and "sentences of row a, seed 1" in said[1]


def test_values_are_there_before_their_line(path, monkeypatch):
    found, write = [], os.write
    monkeypatch.setattr(
        "fairseq_lowrank.records.locks.os.write",
        lambda *words: (found.append(sentences.sentences_file(path).exists()), write(*words))[1],
    )
    append(path, 1)
    assert found == [True]


def test_values_that_cannot_be_written_leave_both_files_as_they_were(path, monkeypatch):
    append(path, 1)
    before = path.read_bytes(), sentences.sentences_file(path).read_bytes()
    monkeypatch.setattr("fairseq_lowrank.files.os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        append(path, 2)
    assert (path.read_bytes(), sentences.sentences_file(path).read_bytes()) == before
    assert sorted(file.name for file in path.parent.iterdir()) == ["mine.jsonl", "mine.sentences.gz"]
