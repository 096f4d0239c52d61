"""Stopping a training by a signal: all workers finish the update, save it, and end together. No worker outlives its launcher."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from fairseq import distributed_utils
from torch import distributed
from torch.multiprocessing import active_children

from fairseq_lowrank.messages import flag_name
from fairseq_lowrank.repairs import commands

CODES = {signal.SIGTERM: commands.STOPPED, signal.SIGUSR1: 0}
"""The signals that stop a training, each with the exit code."""
FORWARDED = 3.0
"""Seconds in which a further signal counts as the same one: Slurm signals every process, and launchers forward what they get."""
LAUNCHER, LAUNCHED, ENDED = "LOWRANK_LAUNCHER", "LOWRANK_LAUNCHED", "LOWRANK_ENDED"
"""Variables of ``fairseq-lowrank launch``: its process, its start, and a folder in which each worker that ends well makes a file."""
RESETS = "reset_optimizer", "reset_lr_scheduler", "reset_meters", "reset_dataloader"
"""Flags with which a training does not resume, but starts with the weights of a checkpoint."""
STOPPING_RULE = "should_stop_early"
"""The function of fairseq-train that is called after each update, before a checkpoint is written."""


class Request:
    """A signal that asks a training to stop.

    Attributes:
        received: the signal that this process got.
        agreed: the signal after which all workers stop.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.agreed: signal.Signals | None = None
        self._time = 0.0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Note a signal. A second one ends the process at once."""
        if self.received is None:
            self.received, self._time = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._time > FORWARDED:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


_request: Request | None = None
"""The request of the training that runs in this process. No ContextVar: fairseq forks in a thread."""


def stop_at_signals(call_main: Callable) -> Callable:
    """Wrap ``call_main``: a training stops after SIGTERM and SIGUSR1, also one whose workers fairseq spawns."""

    @functools.wraps(call_main)
    def call_stoppable(cfg, main, **kwargs):
        if STOPPING_RULE not in getattr(main, "__globals__", {}):
            return call_main(cfg, main, **kwargs)
        with _handler(_forward):
            return call_main(cfg, Stoppable(main), **kwargs)

    return call_stoppable


@contextlib.contextmanager
def _handler(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call a function with each signal that stops a training. Only a main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in CODES}
    try:
        yield
    finally:
        for number, other in before.items():
            signal.signal(number, signal.SIG_DFL if other is None else other)


def _forward(number: int, frame: FrameType | None) -> None:
    """Pass a signal on to the workers that fairseq spawned. Without any, end as without this package."""
    if workers := [worker.pid for worker in active_children() if worker.pid is not None]:
        for worker in workers:
            os.kill(worker, number)
    else:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


@dataclass(frozen=True)
class Stoppable:
    """The main function of fairseq-train, also in a process that fairseq spawns.

    Raises:
        SystemExit: a signal stopped the training.
    """

    main: Callable

    def __call__(self, cfg, *args, **kwargs) -> object:
        global _request
        request = _request = Request()
        module = self.main.__globals__
        rule = module[STOPPING_RULE]
        module[STOPPING_RULE] = stop_as_agreed(rule, request)
        try:
            with _handler(request.receive):
                result = self.main(cfg, *args, **kwargs)
                if request.agreed is not None and distributed.is_initialized():
                    distributed.barrier()  # if one worker ends earlier, its launcher kills the one that saves
        finally:
            module[STOPPING_RULE] = rule
            _request = None
        if folder := os.environ.get(ENDED):
            Path(folder, os.environ["RANK"]).touch()
        if request.agreed is not None:
            end(cfg, request.agreed)
        return result


def end(cfg, number: signal.Signals) -> NoReturn:
    """Print why the training ends and how it resumes, and exit."""
    checkpoint = cfg.checkpoint
    saved = Path(checkpoint.save_dir, "checkpoint_last.pt")
    message = f"{number.name}: stopped after a whole update. "
    if checkpoint.no_save or checkpoint.no_last_checkpoints:
        message += f"--{'no-save' if checkpoint.no_save else 'no-last-checkpoints'}: no checkpoint was written."
    else:
        resets = " and ".join(flag_name(name) for name in RESETS if getattr(checkpoint, name))
        if checkpoint.restore_file == saved.name:
            message += f"The same command{f' without {resets}' * bool(resets)} resumes from {saved}."
        else:
            message += f"To resume, give --restore-file {saved}{f', and leave out {resets}' * bool(resets)}."
    if distributed_utils.is_master(cfg.distributed_training):
        print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
        if CODES[number]:
            commands.report_to_launcher(message)
    for ignored in CODES:  # a launcher that sees another worker end sends them
        atexit.register(signal.signal, ignored, signal.SIG_IGN)
    raise SystemExit(CODES[number])


# fairseq saves what this function stops, without a validation that the unbroken training would not have.
def stop_as_agreed(rule: Callable, request: Request) -> Callable:
    """Wrap ``should_stop_early``: stop after the signal that all workers agree on."""

    @functools.wraps(rule)
    def should_stop_early(cfg, valid_loss):
        stop = rule(cfg, valid_loss)
        if cfg.distributed_training.distributed_world_size == 1:
            request.agreed = request.received
        return stop or request.agreed is not None

    return should_stop_early


# In each update the workers add up what they log, so their agreement needs no further message.
def agree_on_signals(aggregate: Callable) -> Callable:
    """Wrap ``Trainer._aggregate_logging_outputs``: exchange the signals that workers received."""

    @functools.wraps(aggregate)
    def _aggregate_logging_outputs(self, logging_outputs, *extra_stats_to_sum, ignore=False):
        if (request := _request) is None:
            return aggregate(self, logging_outputs, *extra_stats_to_sum, ignore=ignore)
        received = [float(request.received is number) for number in CODES]
        logging_outputs, sums = aggregate(self, logging_outputs, *extra_stats_to_sum, *received, ignore=ignore)
        counts = sums[len(extra_stats_to_sum) :]
        request.agreed = next((number for number, count in zip(CODES, counts, strict=True) if count > 0), None)
        return logging_outputs, sums[: len(extra_stats_to_sum)]

    return _aggregate_logging_outputs


# torchrun and Slurm signal every process of a group. If this ends a process that reads data, torch ends the training.
def _ignore_in_readers() -> None:
    """Let a forked process ignore the signals that stop a training, except SIGTERM from its parent."""
    if _request is None:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, CODES)

    def wait() -> None:
        while True:
            received = signal.sigwaitinfo(CODES)
            if received.si_signo == signal.SIGTERM and received.si_pid == os.getppid():
                os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


os.register_at_fork(after_in_child=_ignore_in_readers)

PR_SET_PDEATHSIG = 1


def end_with_launcher(call_main: Callable) -> Callable:
    """Wrap ``call_main``: a worker of torchrun gets SIGTERM if its launcher dies."""

    @functools.wraps(call_main)
    def call_worker(cfg, main, **kwargs):
        if "TORCHELASTIC_RUN_ID" in os.environ:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
                raise SystemExit(commands.STOPPED)  # it died before
        return call_main(cfg, main, **kwargs)

    return call_worker


def resume_after_restart(call_main: Callable) -> Callable:
    """Wrap ``call_main``: workers that ``launch`` starts again resume from the newest checkpoint since its start."""

    @functools.wraps(call_main)
    def call_worker(cfg, main, **kwargs):
        if (started := os.environ.get(LAUNCHED)) is not None and (newest := _newest(cfg, float(started))) is not None:
            checkpoint = cfg.checkpoint
            checkpoint.restore_file = newest.name if newest.name == "checkpoint_last.pt" else str(newest)
            checkpoint.finetune_from_model = None
            for flag in RESETS:
                setattr(checkpoint, flag, False)
        return call_main(cfg, main, **kwargs)

    return call_worker


def _newest(cfg, started: float) -> Path | None:
    """Return the newest checkpoint that was written after a time: checkpoint_last.pt if it is one of them."""
    if not hasattr(cfg, "checkpoint"):
        return None
    found = [path for path in Path(cfg.checkpoint.save_dir).glob("checkpoint*.pt") if path.stat().st_mtime > started]
    return max(found, key=lambda path: (path.name == "checkpoint_last.pt", path.stat().st_mtime), default=None)
