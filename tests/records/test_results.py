"""Lines of results: appended whole, read past broken ones."""

import contextlib
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.records import results

LINE = {
    **{"paper": "p", "table": "t", "row": "r", "architecture": "a", "flags": "--arch a", "seed": 1, "updates": 1},
    **{"parameters": 1, "metric": "m", "value": 1.5, "split": "test", "tokens_per_second": 1, "versions": {}},
    **{"smoke": False, "date": "2026-01-01", "commit": "c", "machine": {}, "log": "l", "curve": []},
}


def append(path, row):
    results.append_result(path, LINE | {"row": f"{row:05}" * 2000})


def test_lines_from_several_processes_stay_whole(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(append, [path] * 40, range(40)))
    assert sorted(line["row"][:5] for line in results.read_results(path)) == [f"{row:05}" for row in range(40)]


@pytest.mark.parametrize("end", ["", '\n{"paper": "p", "row'])
def test_a_last_line_without_its_end_is_not_glued_to_the_next(tmp_path, end):
    path, said = tmp_path / "results.jsonl", []
    path.write_text(json.dumps(LINE) + end)
    results.append_result(path, LINE | {"row": "next"})
    assert [line["row"] for line in results.read_results(path, said.append)] == ["r", "next"]
    assert [text.partition(": ")[0] for text in said] == ([f"{path}, line 2"] if end else [])


def test_a_line_that_cannot_be_written_whole_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    results.append_result(path, LINE)
    before, write = path.read_bytes(), results.os.write
    monkeypatch.setattr(results.os, "write", lambda handle, data: write(handle, data[:20]))
    with pytest.raises(UserError, match=r"No space left on device; nothing was written\. Free some space"):
        results.append_result(path, LINE)
    assert path.read_bytes() == before
    path.unlink()
    with pytest.raises(UserError, match="No space left on device"):
        results.append_score(path, LINE | {"sentence_values": [1.0]})
    assert not list(tmp_path.iterdir())


def one_score(path, barrier, seed):
    barrier.wait()
    with contextlib.suppress(UserError):
        results.append_score(path, {"row": "x", "seed": seed % 2, "metric": "accuracy", "value": seed})


def test_a_score_sent_by_several_processes_at_once_is_accepted_once(tmp_path):
    path, context = tmp_path / "results.jsonl", multiprocessing.get_context("fork")
    path.write_text("".join(json.dumps(LINE | {"row": f"r{number}"}) + "\n" for number in range(500)))
    barrier = context.Barrier(4)
    processes = [context.Process(target=one_score, args=(path, barrier, seed)) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(line["seed"] for line in results.read_results(path, scores=True) if line["row"] == "x") == [0, 1]


def test_a_file_that_the_lock_s_holder_deleted_is_opened_again(tmp_path, monkeypatch):
    path, locked, times = tmp_path / "results.jsonl", results.locked, []

    @contextlib.contextmanager
    def deleted_once(*words):
        with locked(*words) as handle:
            if not times:
                path.unlink()
            times.append(handle)
            yield handle

    monkeypatch.setattr(results, "locked", deleted_once)
    results.append_result(path, LINE)
    assert len(times) == 2 and len(results.read_results(path)) == 1


@pytest.mark.parametrize("append", [results.append_result, results.append_measurement, results.append_score])
def test_results_go_to_regular_files_alone(tmp_path, append):
    (tmp_path / "null").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    for name, kind in {"null": "no regular file", "pipe": "no regular file", ".": "a folder"}.items():
        with pytest.raises(UserError, match=f"is {kind}"):
            append(tmp_path / name, LINE)


def test_a_check_makes_no_results_file(tmp_path):
    results.check_writable(tmp_path / "new" / "results.jsonl")
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"value": float("nan")}, "value is nan, expected a finite number"),
        ({"value": float("inf")}, "value is inf, expected a finite number"),
        ({"valid_perplexity": float("inf")}, "valid_perplexity is inf, expected a finite number"),
        ({"curve": [{"updates": 1, "train_loss": float("nan"), "valid_loss": None}]}, r"curve\[0\].train_loss is nan"),
        ({"curve": [{"updates": 1}]}, r"curve\[0\] has no train_loss, valid_loss"),
        ({"losses": {"fit": 3}}, "losses.fit is 3, expected an object"),
        (
            {"losses": {"fit": {"bits": "low", "sentence_values": []}}},
            'losses.fit.bits is "low", expected a number',
        ),
        ({"losses": {"fit": {"bits": 1, "sentence_values": [None]}}}, r"losses.fit.sentence_values\[0\] is null"),
        ({"scores": {"rte": "high"}}, 'scores.rte is "high", expected a number'),
        ({"value": True}, "value is true, expected a number"),
        ({"row": 3}, "row is 3, expected a text"),
        ({"versions": []}, r"versions is \[\], expected an object"),
        ({"smoke": "no"}, 'smoke is "no", expected true or false'),
        ({"flags": None}, "flags is null, expected a text or a list"),
        ({"seed": "1"}, 'seed is "1", expected a whole number'),
    ],
)
def test_values_that_are_no_result_are_neither_written_nor_read(tmp_path, change, message):
    path, said = tmp_path / "results.jsonl", []
    with pytest.raises(ValueError, match=message):
        results.append_result(path, LINE | change)
    assert not path.exists()
    path.write_text("".join(json.dumps(line) + "\n" for line in (LINE, LINE | change, LINE)))
    assert results.read_results(path, said.append) == [LINE, LINE]
    assert len(said) == 1 and said[0].startswith(f"{path}, line 2: ")


def test_an_incomplete_line_is_not_written_and_broken_ones_are_named_by_their_numbers(tmp_path):
    path, said = tmp_path / "results.jsonl", []
    with pytest.raises(ValueError, match="has no seed"):
        results.append_result(path, {key: value for key, value in LINE.items() if key != "seed"})
    with pytest.raises(ValueError, match="has no commit"):
        results.append_result(path, {key: value for key, value in LINE.items() if key != "commit"})
    assert not path.exists() and results.read_results(path) == []
    path.write_text("\n".join(["{}", json.dumps(LINE), "{", "7", "", "[" * 100_000]) + "\n")
    assert results.read_results(path, said.append) == [LINE]
    broken = [(1, "has no row, seed"), (3, "not JSON"), (4, "7 is not a result"), (5, "not JSON"), (6, "not JSON")]
    for text, (number, wrong) in zip(said, broken, strict=True):
        assert text.startswith(f"{path}, line {number}: {wrong}")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        results.read_results(path)


def test_lines_of_measurements_that_are_no_trainings_are_left_out(tmp_path):
    path, said = tmp_path / "results.jsonl", []
    path.write_text(json.dumps({"paper": "p", "table": "t", "row": "r", "seed": 1, "commit": "c"}) + "\n")
    assert results.read_results(path, said.append) == [] and said == []


def test_lines_recorded_before_stay_readable(request):
    said = []
    for file in sorted((request.config.rootpath / "results").glob("*.jsonl*")):
        found = results.read_results(file, said.append, measurements=True)
        of_models = ("evidence-measure", "evidence-published-models")
        assert found or file.stem in of_models
        results.read_results(file, said.append, scores=True)
    assert said == []


@pytest.mark.parametrize("name", ["lines.jsonl", "lines.jsonl.gz"])
def test_a_line_is_appended_to_a_plain_or_gzip_file(tmp_path, name):
    line = {"paper": "p", "table": "t", "row": "r", "seed": 1, "metric": "error", "value": 0.5, "smoke": False}
    for seed in (1, 2):
        results.append_measurement(tmp_path / name, line | {"commit": "0" * 40, "seed": seed})
    assert results.results_files([tmp_path]) == [tmp_path / name]
    found = results.read_results(tmp_path / name, measurements=True)
    assert [one["seed"] for one in found] == [1, 2]


def test_measurements_are_read_where_they_are_asked_for(tmp_path):
    path = tmp_path / "lines.jsonl"
    line = {"paper": "evidence", "table": "t", "row": "r", "seed": 1, "metric": "error", "value": 0.5, "smoke": False}
    results.append_measurement(path, line | {"commit": "0" * 40})
    assert results.read_results(path) == []
    assert results.read_results(path, measurements=True) == [line | {"commit": "0" * 40}]
    with pytest.raises(ValueError, match="has no commit"):
        results.append_measurement(path, line)
    with pytest.raises(ValueError, match="expected a finite number"):
        results.append_measurement(path, line | {"commit": "", "value": float("nan")})
    for values in ("0.5", [0.5, "0.4"], [0.5, float("nan")]):
        with pytest.raises(ValueError, match="sentence"):
            results.append_measurement(path, line | {"commit": "", "sentence_values": values})
