"""Training a run: under the flags it was started with, gone on with after an interruption, and not past its end."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.recipes import commands, training
from experiments.recipes.commands import CommandFailed, Commands, follow
from fairseq_lowrank import progress


def updates(run) -> int:
    from fairseq_lowrank.tools.fairseq.checkpoints import load_state

    return load_state(run.last)["optimizer_history"][-1]["num_updates"]


@pytest.fixture
def train(commands, request):
    """``train(run, settings)``: the commands that it took."""

    def call(run, settings) -> list[str]:
        commands.calls.clear()
        run.folder.mkdir(parents=True, exist_ok=True)
        training.train(run, settings, request.config.rootpath, commands)
        return list(commands.calls)

    return call


def forget_the_end(run) -> None:
    """As if everything had been killed between the last checkpoint and the note of the end."""
    training.write_manifest(run.folder, training.read_manifest(run.folder) | {"ended": False})


@pytest.mark.parametrize("end, count", [("--max-update 3", 3), ("--max-update 0 --max-epoch 1", None)])
def test_a_training_at_its_end_is_not_started_again(recipe, settings, train, end, count):
    settings = settings(extra=tuple(end.split()))
    own = recipe(mha="--attention mha")
    run = own.run(own.rows["mha"], settings)
    assert train(run, settings) == ["fairseq-train"]
    done = updates(run)
    assert done == (count or done)
    assert train(run, settings) == []
    forget_the_end(run)
    assert train(run, settings) == [] and updates(run) == done


def test_a_training_that_stopped_before_its_end_goes_on(recipe, settings, train, commands):
    settings = settings()
    own = recipe(mha="--attention mha --save-interval-updates 2")
    run = own.run(own.rows["mha"], settings)

    def interrupted(words, log, keep=None, patches=""):
        short = words[:]
        short[short.index("--max-update") + 1] = "2"
        commands(short, log)

    run.folder.mkdir(parents=True)
    training.train(run, settings, own.root, interrupted)
    forget_the_end(run)
    assert updates(run) == 2
    assert train(run, settings) == ["fairseq-train"] and updates(run) == 3
    assert len(training.read_manifest(run.folder)["starts"]) == 2


@pytest.mark.parametrize(("given", "faster", "used"), [("auto", "onednn", "onednn"), ("torch", "onednn", "torch")])
def test_linear_layers_are_chosen_once(recipe, settings, commands, monkeypatch, given, faster, used):
    own = recipe(mha="--attention mha --save-interval-updates 2")
    run = own.run(own.rows["mha"], settings())
    run.folder.mkdir(parents=True)
    monkeypatch.setattr(training, "faster_linear", lambda threads: faster)
    passed = []

    def interrupted(words, log, keep=None, patches=""):
        passed.append(patches)
        short = words[:]
        short[short.index("--max-update") + 1] = "2"
        commands(short, log)

    training.train(run, settings(linear=given), own.root, interrupted)
    forget_the_end(run)
    monkeypatch.setattr(training, "faster_linear", lambda threads: "another processor's choice")
    training.train(run, settings(linear="auto"), own.root, lambda words, log, keep, patches="": passed.append(patches))
    assert passed == ["onednn-linear" if used == "onednn" else ""] * 2
    assert training.read_manifest(run.folder)["linear"] == used


def test_patches_of_a_command_add_to_those_that_are_on(monkeypatch):
    monkeypatch.setenv("LOWRANK_ENABLE", "whole-validation")
    assert Commands().with_patches("onednn-linear")["LOWRANK_ENABLE"] == "whole-validation,onednn-linear"
    assert Commands().with_patches("")["LOWRANK_ENABLE"] == "whole-validation"
    monkeypatch.delenv("LOWRANK_ENABLE")
    assert Commands().with_patches("onednn-linear")["LOWRANK_ENABLE"] == "onednn-linear"


def test_a_training_on_another_text_is_not_taken_for_this_one(recipe, settings, train):
    settings, own = settings(), recipe(mha="--attention mha")
    run = own.run(own.rows["mha"], settings)
    assert train(run, settings) == ["fairseq-train"]
    data = run.data / "bin"
    published = data.resolve()
    data.unlink()
    shutil.copytree(published, data)  # the same text, prepared again
    assert train(run, settings) == []
    first, *_ = data.glob("dict*.txt")
    first.write_text(first.read_text() + "another 1\n")
    with pytest.raises(ValueError, match=r"was trained with other dictionaries than .* has now"):
        train(run, settings)
    first.write_text(first.read_text().removesuffix("another 1\n"))
    test, valid = (next(data.glob(f"{split}*.idx")) for split in ("test", "valid"))
    shutil.copy(valid, test)
    assert train(run, settings) == []  # a training reads no test set
    valid.write_bytes(valid.read_bytes() + b"1")
    with pytest.raises(ValueError, match=r"was trained with other sentences than .* has now"):
        train(run, settings)


def test_our_own_commands_are_found_where_the_package_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(Path(__file__).parents[3])
    Commands()(["python", "-m", "experiments", "pack", "--help"], tmp_path / "log")
    said = (tmp_path / "log").read_text()
    assert said.startswith("+ python -m experiments pack --help\n") and "usage: python -m experiments pack" in said


def test_flags_are_noted_before_a_training_starts_and_other_flags_have_a_folder_of_their_own(recipe, settings, capsys):
    own = recipe(mha="--attention mha")
    first, second = (own.run(own.rows["mha"], settings(extra=extra)) for extra in ((), ("--lr", "1e-7", "--fp16")))
    noted = []

    def execute(words, log, keep=None, patches=""):
        noted.append(training.read_manifest(log.parent)["flags"])

    for run in (first, second):
        run.folder.mkdir(parents=True)
        training.train(run, settings(), own.root, execute)
    assert noted == [list(first.flags), list(second.flags)]
    said = capsys.readouterr().err
    assert f"{first.folder} holds this row with other flags: --lr 1e-7 (0.01), --fp16 (no --fp16)" in said


def test_a_folder_with_a_training_of_other_flags_is_refused_and_the_flags_are_named(recipe, settings, train):
    own = recipe(mha="--attention mha")
    run = own.run(own.rows["mha"], settings())
    run.folder.mkdir(parents=True)
    note = {"corpus": run.corpus, "flags": [*run.flags, "--dropout", "0.9"], "starts": []}
    (run.folder / "run.json").write_text(json.dumps(note))
    with pytest.raises(ValueError, match=r"other flags: no --dropout \(0.9\)"):
        train(run, settings())
    (run.folder / "run.json").unlink()
    run.last.parent.mkdir()
    run.last.touch()
    with pytest.raises(ValueError, match="flags are not known: move"):
        train(run, settings())


def test_a_damaged_note_or_a_training_without_a_best_checkpoint_is_refused_in_one_line(recipe, settings, train):
    own = recipe(mha="--attention mha")
    run = own.run(own.rows["mha"], settings())
    run.folder.mkdir(parents=True)
    (run.folder / "run.json").write_text('{"flags": 3}')
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        train(run, settings())
    (run.folder / "run.json").unlink()
    training.record_start(run, settings(), own.root)
    training.write_manifest(run.folder, training.read_manifest(run.folder) | {"ended": True})
    run.last.parent.mkdir()
    run.last.touch()
    with pytest.raises(ValueError, match=r"has no checkpoint_best\.pt"):
        train(run, settings())


def test_a_damaged_checkpoint_is_left_to_fairseq_train(tmp_path):
    (tmp_path / "checkpoint_last.pt").write_bytes(b"half")
    assert training.reached(tmp_path / "checkpoint_last.pt", update=1) is False


def hold(folder, program, log) -> None:
    with training.lock(folder) as handle:
        Commands()([sys.executable, "-c", program, str(log)], log, handle)


def wait_for(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_command_outlives_a_killed_engine_and_keeps_the_lock_until_it_ends(tmp_path):
    log, go = tmp_path / "log", tmp_path / "go"
    program = (
        "import os, time; print('begun', flush=True)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.05)\n"
        "print('ended', flush=True)"
    )
    process = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path, program, log))
    process.start()
    wait_for(lambda: log.exists() and "begun\n" in log.read_text())
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert training.is_locked(tmp_path)
    go.touch()
    wait_for(lambda: not training.is_locked(tmp_path))
    assert log.read_text().endswith("ended\n")


def prepare_until_ended(python) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.executable = str(python)
    Commands().prepare(["brown"])


def test_a_preparation_ends_with_its_engine(tmp_path):
    python, started = tmp_path / "python", tmp_path / "started"
    python.write_text(f'#!/bin/sh\necho "$$ $*" >{started}.part\nmv {started}.part {started}\nexec sleep 60\n')
    python.chmod(0o755)
    process = multiprocessing.get_context("fork").Process(target=prepare_until_ended, args=(python,))
    process.start()
    wait_for(started.exists)
    child, *words = started.read_text().split()
    assert words == ["-m", "experiments.corpora", "brown"]
    process.terminate()
    process.join(30)
    with pytest.raises(ProcessLookupError):
        os.kill(int(child), 0)


@pytest.mark.parametrize(("every", "shown"), [(0.0, 3), (60.0, 0)])
def test_updates_are_shown_now_and_then(tmp_path, capsys, every, shown):
    log, lines = tmp_path / "log", []
    with open(log, "w") as file:
        for updates in (50, 100, 150):
            fields = {"epoch": 1, "update": 0.1, "loss": "8.1", "wps": "900", "num_updates": str(updates)}
            file.write(f"date | INFO | train_inner | {json.dumps(fields)}\n")
            lines.append(f"train_inner | epoch 1 | loss 8.1 | wps 900 | num_updates {updates}")
    with open(log, "rb") as file:
        assert follow(subprocess.Popen(["true"]), file, "fairseq-train", every) == 0
    assert capsys.readouterr().err == "".join(f"  {said}\n" for said in lines[:shown])


class Steps:
    """A process that ends after some waits, each of ten seconds by the clock, in which it logs some lines."""

    def __init__(self, file, *waits):
        self.file, self.waits, self.now = file, iter(waits), 0.0

    def monotonic(self):
        return self.now

    def wait(self, timeout):
        if (lines := next(self.waits, None)) is None:
            return 0
        self.file.write("".join(f"date | INFO | {line}\n" for line in lines))
        self.file.flush()
        self.now += 10
        raise subprocess.TimeoutExpired("command", timeout)


@pytest.fixture
def followed(tmp_path, monkeypatch, capsys):
    """``followed(*waits)``: the lines that are shown of a command with this log."""

    def call(*waits):
        with open(tmp_path / "log", "w") as file, open(tmp_path / "log", "rb") as said:
            steps = Steps(file, *waits)
            monkeypatch.setattr(commands, "time", steps)
            monkeypatch.setattr(progress, "time", steps)
            assert follow(steps, said, "fairseq-generate") == 0
        return capsys.readouterr().err.splitlines()

    return call


def test_silent_command_shows_a_line_each_ten_seconds(followed):
    assert followed([], ["task | 1000 examples"]) == [f"  fairseq-generate: {n} s so far" for n in (10, 20)]


def test_batches_of_a_command_have_an_estimate(followed):
    line = "fairseq.logging.progress_bar | :      {} / 8 wps=300"
    assert followed([], [line.format(2), line.format(4)], []) == [
        "  fairseq-generate: 10 s so far",
        "  fairseq-generate: 4 of 8 batches in 20 s, about 20 s left",
        "  fairseq-generate: 4 of 8 batches in 30 s, about 30 s left",
    ]


def test_rare_updates_are_shown_and_not_hidden_by_the_time(followed):
    fields = {"epoch": 1, "loss": "8.1", "num_updates": "50"}
    lines = followed([], [f"train_inner | {json.dumps(fields)}"] * 2, [])
    assert lines == [
        "  fairseq-generate: 10 s so far",
        "  train_inner | epoch 1 | loss 8.1 | num_updates 50",
        "  train_inner | epoch 1 | loss 8.1 | num_updates 50",
    ]


@pytest.mark.parametrize(
    ("tokens", "flags", "interval"),
    [
        (100_000, "--max-tokens 1000", 10),
        (100_000, "--max-tokens 1000 --update-freq 2,4", 5),
        (100_000, "--batch-size 10 --tokens-per-sample 100", 10),
        (100_000, "--max-tokens 1000 --max-update 5", 1),
        (100_000, "--max-tokens 1000 --max-update 0", 10),
        (100, "--max-tokens 4096", 1),
        (10**7, "--max-tokens 1000", 50),
        (0, "--max-tokens 1000", 50),
        (100_000, "--max-tokens no-number", 2),
    ],
)
def test_short_epoch_has_lines_of_its_updates(recipe, settings, tokens, flags, interval, tmp_path):
    own = recipe(mha="--attention mha")
    own.common = tuple(flags.split())
    run = replace(own.run(own.rows["mha"], settings()), data=tmp_path / "corpus")
    run.bin.mkdir(parents=True)
    if tokens:
        (run.bin / "train.de-en.en.bin").write_bytes(b"0123" * tokens)
        (run.bin / "train.de-en.de.bin").write_bytes(b"0123" * (tokens // 2))
    assert training.log_interval(run) == interval


def test_the_interval_that_a_user_gives_comes_last(recipe, settings, request):
    asked, chosen = [], settings(extra=("--log-interval", "7"), dry_run=True)
    own = recipe(mha="--attention mha")
    training.train(
        own.run(own.rows["mha"], chosen), chosen, request.config.rootpath, lambda words, *_: asked.extend(words)
    )
    assert [word for flag, word in pairwise(asked) if flag == "--log-interval"] == ["1", "7"]


def test_lines_of_the_log_cut_no_line_of_the_output(tmp_path):
    said = "import sys; print('H' * 5000); print('log', file=sys.stderr); print('H' * 5000)"
    program = f"{said}; print('log', file=sys.stderr)"
    Commands()([sys.executable, "-c", program], tmp_path / "log")
    assert (tmp_path / "log").read_text().splitlines()[1:] == ["H" * 5000, "log", "H" * 5000, "log"]


def test_output_is_utf_8_in_every_locale(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    Commands()([sys.executable, "-c", "print('H-0 ein schöner Hund – 犬')"], tmp_path / "log")
    assert (tmp_path / "log").read_text(encoding="utf-8").endswith("\nH-0 ein schöner Hund – 犬\n")


def test_a_command_that_fails_shows_the_end_of_its_log_and_its_epochs_are_shown(tmp_path, capsys):
    program = "print('x | INFO | train | epoch 1 | loss 2'); [print('line', n) for n in range(9)]; raise SystemExit(3)"
    with pytest.raises(CommandFailed, match=r"(?s)the end of .*/log:\nline 4\n.*line 8$") as failed:
        Commands()([sys.executable, "-c", program], tmp_path / "log")
    assert failed.value.code == 3
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("+ ") and said[1:] == ["train | epoch 1 | loss 2"]
    Commands(dry_run=True)(["no-such-command", "a b"], tmp_path / "none")
    assert capsys.readouterr().err == "+ no-such-command 'a b'\n" and not (tmp_path / "none").exists()
