"""Rows that are trained at the same time: how many, what they say, and how they end."""

import os
import signal
import subprocess
import sys
import time

import pytest

from experiments.recipes.jobs import Job, run_jobs
from experiments.recipes.settings import Settings


def job(code: str) -> Job:
    return Job([sys.executable, "-c", code], os.environ)


def test_lines_of_progress_have_the_name_of_their_job(capfd):
    code = "import sys; print(sys.stdin.read(), file=sys.stderr); print('result')"
    assert run_jobs({"mha": job(code), "mixhead-a": job(code)}, 2, "declared") == 0
    said = capfd.readouterr()
    assert sorted(said.err.split()) == sorted(["mha", "|", "declared", "mixhead-a", "|", "declared"])
    assert said.out.split() == ["result", "result"]


def test_as_many_run_at_once_as_are_allowed(tmp_path):
    """Each job waits until it is not alone, and notes how many there are a moment later."""
    code = f"""
import os, time
running = lambda: sum(name.endswith(".running") for name in os.listdir("{tmp_path}"))
open(f"{tmp_path}/{{os.getpid()}}.running", "w")
end = time.monotonic() + 5
while running() < 2 and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(0.2)
open(f"{tmp_path}/{{os.getpid()}}.count", "w").write(str(running()))
os.remove(f"{tmp_path}/{{os.getpid()}}.running")
"""
    assert run_jobs({str(number): job(code) for number in range(4)}, 2, "") == 0
    counts = [int(file.read_text()) for file in tmp_path.glob("*.count")]
    assert len(counts) == 4 and max(counts) == 2


def test_after_a_failure_none_is_started(tmp_path):
    last = job(f"open({str(tmp_path / 'started')!r}, 'w')")
    assert run_jobs({"wrong": job("raise SystemExit(3)"), "next": last}, 1, "") == 3
    assert not (tmp_path / "started").exists()


def test_a_job_that_ends_before_it_reads_keeps_its_message_and_status(capfd):
    wrong = job("import sys; print('no plugin', file=sys.stderr); sys.exit(3)")
    assert run_jobs({"wrong": wrong}, 1, "declared" * 50_000) == 3
    assert capfd.readouterr().err == "wrong | no plugin\n"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_all_jobs(sent, tmp_path):
    code = "import os, sys, time; print(os.getpid(), file=sys.stderr, flush=True); time.sleep(60)"
    parent = f"""
import os, signal, sys
from experiments.recipes.jobs import Job, run_jobs
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
run_jobs({{name: Job([sys.executable, "-c", {code!r}], os.environ) for name in "ab"}}, 2, "")
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.PIPE, text=True)
    children = [int(process.stderr.readline().split()[-1]) for _ in range(2)]
    process.send_signal(sent)
    process.communicate(timeout=30)
    assert process.returncode != 0
    for child in children:
        for _ in range(50):
            if not os.path.exists(f"/proc/{child}"):
                break
            time.sleep(0.1)
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


@pytest.mark.parametrize(
    ("given", "jobs", "threads"),
    [
        ({}, 1, 4),
        ({"JOBS": "cores"}, 4, 1),
        ({"JOBS": "cores", "THREADS": "2"}, 2, 2),
        ({"JOBS": "cores", "THREADS": "8"}, 1, 8),
        ({"JOBS": "3"}, 3, 1),
        ({"JOBS": "1"}, 1, 4),
        ({"OMP_NUM_THREADS": "2"}, 1, 2),
        ({"OMP_NUM_THREADS": "0"}, 1, 4),
        ({"OMP_NUM_THREADS": "²"}, 1, 4),
    ],
)
def test_jobs_and_threads_share_the_cores(given, jobs, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    found = Settings.read({"LOWRANK_WORK": "/work"} | given)
    assert (found.jobs, found.threads) == (jobs, threads)


def test_every_row_runs_once_with_each_seed_in_a_process_of_its_own(recipe, settings, monkeypatch, engine):
    seen = []

    def run(jobs, at_once, text):
        seen.extend(
            (name, *(one.environment[key] for key in ("ROWS", "SEED", "JOBS", "THREADS"))) for name, one in jobs.items()
        )
        return 0

    monkeypatch.setattr("experiments.recipes.engine.run_jobs", run)
    own, chosen = recipe(mha="--attention mha", gain="--attention gain"), settings(seeds=(1, 2), jobs=2, threads=1)
    assert engine(own, chosen).run_at_once("declared") == 0
    assert seen == [(f"{row}, seed {seed}", row, str(seed), "1", "1") for seed in (1, 2) for row in ("mha", "gain")]
