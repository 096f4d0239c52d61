"""A signal stops a training after a whole update, and the resumed training equals the unbroken one."""

import multiprocessing
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.trainer import Trainer

from fairseq_lowrank import plugin  # noqa: F401 (what --user-dir brings)
from fairseq_lowrank.repairs import commands, stopping
from fairseq_lowrank.repairs.loading import load_checkpoint

TRAIN = [
    *("--arch", "lowrank_transformer", "--attention", "mixhead-b", "--encoder-layers", "1", "--decoder-layers", "1"),
    *("--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16", "--encoder-attention-heads", "4"),
    *("--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "4"),
    *("--cpu", "--optimizer", "adam", "--lr", "0.01", "--dropout", "0.3", "--batch-size", "40", "--update-freq", "2"),
    *("--no-progress-bar", "--no-epoch-checkpoints", "--max-epoch", "3", "--patience", "9"),
]
EPOCH = 3  # updates


@pytest.fixture(autouse=True)
def signals_are_handled_as_before(monkeypatch):
    """No training of this process leaves a handler, or ignores signals when the process ends."""
    monkeypatch.setattr(stopping.atexit, "register", lambda *_: None)
    yield
    assert {signal.getsignal(number) for number in stopping.CODES} == {signal.SIG_DFL}
    assert stopping._request is None


def state(folder):
    saved = load_checkpoint(folder / "checkpoint_last.pt")
    extra = saved["extra_state"]
    return saved["model"], saved["last_optimizer_state"], extra["train_iterator"], extra.get("best")


@pytest.fixture
def train(fairseq_command, translation_data, tmp_path, monkeypatch):
    """``train(folder, *flags, at=N, do=F)``: train, and call F before the update after the N-th."""

    def run(folder, *flags, at=None, do=None):
        def train_step(self, samples):
            if self.get_num_updates() == at:
                do()
            return step(self, samples)

        step = Trainer.train_step
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "train_step", train_step)
            return fairseq_command("train", translation_data, *TRAIN, *flags, "--save-dir", tmp_path / folder)

    return run


@pytest.mark.parametrize(
    ("number", "code", "updates", "workers"),
    [
        (signal.SIGTERM, 143, 3, 0),  # the fourth update, in the middle of the second epoch
        (signal.SIGUSR1, 0, 5, 0),  # the last update of the second epoch
        (signal.SIGTERM, 143, 1, 1),
    ],
)
def test_signal_stops_after_a_whole_update(train, tmp_path, capsys, number, code, updates, workers):
    of_other_tests = multiprocessing.active_children()

    def signal_every_process():
        # Slurm signals the processes that read data too; their parent's SIGTERM would end them
        for reader in set(multiprocessing.active_children()).difference(of_other_tests):
            for name in ("TERM", "USR1"):
                subprocess.run(["kill", f"-{name}", str(reader.pid)], check=True)
        signal.raise_signal(number)

    flags = ["--num-workers", workers]
    train("whole", *flags)
    with pytest.raises(SystemExit) as exit:
        train("stopped", *flags, at=updates, do=signal_every_process)
    assert exit.value.code == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        f"fairseq-train: {number.name}: stopped after a whole update. The same command resumes from "
    )
    history = load_checkpoint(tmp_path / "stopped" / "checkpoint_last.pt")["optimizer_history"]
    assert history[-1]["num_updates"] == updates + 1
    train("stopped", *flags)
    torch.testing.assert_close(state(tmp_path / "stopped"), state(tmp_path / "whole"), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--no-save"], "--no-save: no checkpoint was written"),
        (["--no-last-checkpoints"], "--no-last-checkpoints: no checkpoint was written"),
        (["--restore-file", "{folder}/other.pt"], "stopped/checkpoint_last.pt."),
        (
            ["--reset-optimizer", "--reset-meters"],
            "The same command without --reset-optimizer and --reset-meters resumes from ",
        ),
        (
            ["--restore-file", "{folder}/other.pt", "--reset-dataloader"],
            "checkpoint_last.pt, and leave out --reset-dataloader.",
        ),
    ],
)
def test_line_says_how_to_resume(train, capsys, tmp_path, flags, words):
    flags = [flag.format(folder=tmp_path / "stopped") for flag in flags]
    with pytest.raises(SystemExit):
        train("stopped", "--num-workers", 0, *flags, at=0, do=lambda: signal.raise_signal(signal.SIGTERM))
    assert words in capsys.readouterr().err.splitlines()[-1]


def ended(run) -> int:
    """Return how a copy of this process ends that calls a function: an exit code, or minus a signal."""
    if (child := os.fork()) == 0:
        try:
            run()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("seconds", "end"), [(0, 0), (stopping.FORWARDED + 1, -signal.SIGUSR1)])
def test_second_signal_ends_at_once_unless_a_launcher_forwarded_the_first(seconds, end):
    def run():
        request = stopping.Request()
        request.receive(signal.SIGTERM, None)
        request._time -= seconds
        request.receive(signal.SIGUSR1, None)

    assert ended(run) == end


def test_workers_stop_if_one_of_them_got_a_signal(monkeypatch):
    def add(self, outputs, *sums, ignore):
        return outputs, [*sums[:-2], sums[-2] + 0.0, sums[-1] + 1.0]  # another worker got SIGUSR1

    request = stopping.Request()
    monkeypatch.setattr(stopping, "_request", request)
    assert stopping.agree_on_signals(add)(None, ["log"], 4, 5) == (["log"], [4, 5])
    cfg = SimpleNamespace(distributed_training=SimpleNamespace(distributed_world_size=2))
    assert stopping.stop_as_agreed(lambda *_: False, request)(cfg, None)
    assert request.agreed is signal.SIGUSR1
    monkeypatch.setattr(stopping, "_request", None)


def test_one_of_several_workers_does_not_stop_alone():
    request = stopping.Request()
    request.receive(signal.SIGTERM, None)
    cfg = SimpleNamespace(distributed_training=SimpleNamespace(distributed_world_size=2))
    assert not stopping.stop_as_agreed(lambda *_: False, request)(cfg, None)


def should_stop_early(cfg, valid_loss):
    return False


def spawned_main(cfg, begun):
    """A training in a process that fairseq spawns."""
    begun.set()
    while not should_stop_early(cfg, None):
        time.sleep(0.01)


def test_signal_reaches_the_workers_that_fairseq_spawns():
    context = multiprocessing.get_context("fork")
    distributed = SimpleNamespace(distributed_world_size=1, distributed_rank=0)
    checkpoint = SimpleNamespace(save_dir="", no_save=True, no_last_checkpoints=False, restore_file="")
    cfg = SimpleNamespace(distributed_training=distributed, checkpoint=checkpoint)

    def spawn(cfg, main):
        begun = context.Event()
        worker = context.Process(target=main, args=(cfg, begun))
        worker.start()
        assert begun.wait(30)
        signal.raise_signal(signal.SIGTERM)
        worker.join()
        return worker.exitcode

    assert stopping.stop_at_signals(spawn)(cfg, spawned_main) == commands.STOPPED


def test_worker_ends_with_its_launcher(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    reader, writer = os.pipe()

    def launch():
        if os.fork() == 0:
            monkeypatch.setenv(stopping.LAUNCHER, str(os.getppid()))
            stopping.end_with_launcher(lambda cfg, main: (os.write(writer, b"trains"), time.sleep(60)))(None, None)
            os._exit(0)
        os.close(writer)
        assert os.read(reader, 6) == b"trains"
        os.kill(os.getpid(), signal.SIGKILL)

    start = time.monotonic()
    assert ended(launch) == -signal.SIGKILL
    os.close(writer)
    assert os.read(reader, 1) == b""  # nobody is left who could write
    os.close(reader)
    assert time.monotonic() - start < 30


def test_worker_without_its_launcher_does_not_begin(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv(stopping.LAUNCHER, "-1")
    with pytest.raises(SystemExit):
        ended_worker = stopping.end_with_launcher(lambda *_: pytest.fail("it began"))
        monkeypatch.setattr(stopping.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: None))
        ended_worker(None, None)


def test_restarted_workers_resume_from_the_newest_checkpoint(tmp_path, monkeypatch):
    flags = dict.fromkeys(("reset_optimizer", "reset_lr_scheduler", "reset_meters", "reset_dataloader"), True)

    def restored(name, age):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
        checkpoint = SimpleNamespace(
            save_dir=str(tmp_path), restore_file="other.pt", finetune_from_model="a.pt", **flags
        )
        stopping.resume_after_restart(lambda cfg, main: None)(SimpleNamespace(checkpoint=checkpoint), None)
        return checkpoint.restore_file, checkpoint.finetune_from_model, checkpoint.reset_dataloader

    monkeypatch.setenv(stopping.LAUNCHED, "1000")
    given = "other.pt", "a.pt", True
    assert restored("checkpoint_last.pt", 5) == given  # of an earlier command
    assert restored("crash.pt", -5) == given
    assert restored("checkpoint_1_2.pt", -5) == (str(tmp_path / "checkpoint_1_2.pt"), None, False)
    assert restored("checkpoint_last.pt", -4) == ("checkpoint_last.pt", None, False)
    monkeypatch.delenv(stopping.LAUNCHED)
    assert restored("checkpoint_last.pt", -4) == given


def test_signals_of_other_commands_stay(monkeypatch):
    handlers = []
    stopping.stop_at_signals(lambda cfg, main: handlers.append(signal.getsignal(signal.SIGTERM)))(None, len)
    assert handlers == [signal.SIG_DFL]
