"""The engine of controlled tasks: finished runs are kept, others resume, and one command does both."""

import gzip
import json
import os

import pytest

from experiments import __main__ as experiments
from experiments.controlled import matrices, runs
from fairseq_lowrank.records.locks import locked
from fairseq_lowrank.records.results import read_results

ROWS = "n16-shared-h(16|32)-mha"


def command(folder, *flags):
    files = ["--results", str(folder / "lines.jsonl"), "--log", str(folder / "log.gz")]
    return experiments.main(["controlled", "matrices", "--rows", ROWS, "--seeds", "1", "--steps", "2", *files, *flags])


def test_each_run_leaves_a_line_with_its_commit_and_its_log(tmp_path, capsys):
    assert command(tmp_path) == 0
    out = capsys.readouterr().out
    assert "16 × 4" in out and "32 × 2" in out
    lines = read_results(tmp_path / "lines.jsonl", measurements=True)
    assert [line["row"] for line in lines] == ["n16-shared-h16-mha-2-updates", "n16-shared-h32-mha-2-updates"]
    assert all(line["paper"] == "evidence" and line["table"] == "matrices" and line["smoke"] for line in lines)
    assert {line["commit"] for line in lines} == {runs.checked_out_commit()}
    with gzip.open(tmp_path / "log.gz", "rt") as file:
        log = file.read()
    assert all(f"# {line['row']} seed 1" in log and f"{line['value']:.6g}" in log for line in lines)


def test_a_log_that_cannot_be_written_whole_stays_as_it_was(tmp_path, monkeypatch, capsys):
    command(tmp_path)
    before, write = (tmp_path / "log.gz").read_bytes(), os.write
    (tmp_path / "lines.jsonl").unlink()
    monkeypatch.setattr("fairseq_lowrank.records.locks.os.write", lambda handle, data: write(handle, data[:20]))
    assert command(tmp_path) == 2 and "log.gz: No space left on device" in capsys.readouterr().err
    assert (tmp_path / "log.gz").read_bytes() == before


def test_code_in_no_commit_makes_trials_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DIRTY", "")
    monkeypatch.setattr(runs, "checked_out_commit", lambda: "a" * 40 + "-dirty")
    monkeypatch.setattr(matrices, "STEPS", 2)
    assert command(tmp_path) == 2
    assert "DIRTY=1" in capsys.readouterr().err and not (tmp_path / "lines.jsonl").exists()
    monkeypatch.setattr(matrices, "STEPS", 3)
    assert command(tmp_path) == 0
    (first, _) = read_results(tmp_path / "lines.jsonl", measurements=True)
    assert first["smoke"] and first["code"] == runs.this_code() and first["machine"]["cpu"] and first["date"]


def test_progress_counts_the_rows_that_are_left(tmp_path):
    command(tmp_path)
    path = tmp_path / "lines.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    rows = [f"n16-shared-h{heads}-mha" for heads in (16, 32)]
    chosen, shown = [run for run in matrices.runs([1], steps=2) if run.setting_name in rows], []
    runs.TaskEngine(matrices, chosen, path, say=lambda line: None, show=shown.append).run_rows()
    assert len(chosen) == 2 and shown and all(line.startswith("1 of 1, n16-shared-h32-mha") for line in shown)


def test_what_is_finished_is_not_run_again_and_what_is_not_goes_on(tmp_path, capsys):
    command(tmp_path)
    path = tmp_path / "lines.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    kept = json.dumps(json.loads(first) | {"value": 0.123}) + "\n"
    path.write_text(kept)
    capsys.readouterr()
    assert command(tmp_path) == 0
    again = path.read_text().splitlines(keepends=True)
    assert again[0] == kept
    assert json.loads(again[1])["value"] == json.loads(second)["value"]
    assert "h16" not in capsys.readouterr().err


def test_a_run_of_another_process_is_skipped(tmp_path, capsys):
    with locked(tmp_path / "lines.n16-shared-h16-mha-2-updates-seed1.lock"):
        assert command(tmp_path) == 0
    assert "n16-shared-h16-mha-2-updates seed 1: another process is running this row" in capsys.readouterr().err
    [line] = read_results(tmp_path / "lines.jsonl", measurements=True)
    assert line["row"] == "n16-shared-h32-mha-2-updates"
    assert command(tmp_path) == 0
    assert len(read_results(tmp_path / "lines.jsonl", measurements=True)) == 2
    assert not list(tmp_path.glob("*.lock"))


def test_of_lines_of_one_row_and_seed_the_last_one_counts(tmp_path):
    command(tmp_path)
    path = tmp_path / "lines.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(first + second + json.dumps(json.loads(first) | {"value": 0.123}) + "\n")
    values = {line["row"]: line["value"] for line in runs.lines_of(matrices, path, steps=2)}
    assert list(values.values()) == [0.123, json.loads(second)["value"]]
    header, rows = runs.table(runs.lines_of(matrices, path, steps=2))
    assert header[2] == "relative squared error, by seed"
    assert rows[0][1:] == ["16 × 4", "1: 0.123", "0.123", "0.123"]


def test_a_trial_does_not_stand_for_a_run(tmp_path):
    command(tmp_path)
    assert not runs.lines_of(matrices, tmp_path / "lines.jsonl")
    assert experiments.main(["controlled", "matrices", "--no-runs", "--results", str(tmp_path / "lines.jsonl")]) == 2


def test_more_updates_than_the_tasks_make_a_row_of_their_own_and_no_trial(tmp_path, capsys, monkeypatch):
    command(tmp_path)
    monkeypatch.setattr(matrices, "STEPS", 1)
    assert command(tmp_path) == 0
    lines = read_results(tmp_path / "lines.jsonl", measurements=True)
    assert [(line["row"], line["smoke"]) for line in lines[2:]] == [
        ("n16-shared-h16-mha-2-updates", False),
        ("n16-shared-h32-mha-2-updates", False),
    ]
    assert not runs.lines_of(matrices, tmp_path / "lines.jsonl")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rows", "("], "--rows '('"),
        (["--rows", "nothing"], "--rows 'nothing'"),
        (["--steps", "0"], "--steps 0"),
        (["--no-runs"], "has no finished run"),
        (["--log", "/"], "/: is a folder"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(tmp_path, capsys, flags, message):
    assert experiments.main(["controlled", "matrices", "--results", str(tmp_path / "none.jsonl"), *flags]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "none.jsonl").exists()


def test_tables_stand_in_the_order_of_the_tasks_runs(tmp_path):
    path = tmp_path / "lines.jsonl"
    names = list(dict.fromkeys(run.row for run in matrices.runs()))[:3]
    fixed = {"paper": "evidence", "table": "matrices", "seed": 1, "metric": "x", "value": 1.0, "commit": None}
    lines = [fixed | {"row": name, "smoke": False} for name in ("unknown", *reversed(names))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line["row"] for line in runs.lines_of(matrices, path)] == [*names, "unknown"]


def test_styles_follow_the_flags_and_not_the_names():
    from fairseq_lowrank.tools import pictures

    flags = {"gain-of-8": "--attention mixhead-a", "x": "--attention mha --activation sigsoftmax"}
    lines = [{"method": name, "flags": text} for name, text in flags.items()]
    colours = [style["color"] for style in runs.styles_of(lines, list(flags))]
    assert colours == [pictures.colour_of("mixhead-a"), pictures.colour_of("sigsoftmax")]
