"""fairseq-lowrank launch: several workers train as one process with larger updates."""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import fairseq_lowrank
from fairseq_lowrank import cli
from fairseq_lowrank.cli.launch import report_failure, run_workers
from fairseq_lowrank.repairs.loading import load_checkpoint

PACKAGE = Path(fairseq_lowrank.__file__).resolve().parent

# A user's own plugin. Its criterion writes down the sentences and the loss of each training batch, for each worker.
RECORDER = """
import json, os, signal
from pathlib import Path

import fairseq_lowrank
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig


# The second worker is killed in its sixth update. After the restart, one worker gets a signal in its third.
EVENTS = {("0", "1", 6): signal.SIGKILL, ("1", "1", 3): signal.SIGUSR1}


@register_criterion("recorded_cross_entropy", dataclass=CrossEntropyCriterionConfig)
class RecordedCrossEntropy(CrossEntropyCriterion):
    batches = 0

    def forward(self, model, sample, reduce=True):
        loss, size, output = super().forward(model, sample, reduce)
        if model.training:
            line = {"ids": sample["id"].tolist(), "loss": loss.item(), "size": size}
            path = Path(os.environ["RECORDS"]) / os.environ.get("RANK", "0")
            with path.open("a") as file:
                file.write(json.dumps(line) + "\\n")
            RecordedCrossEntropy.batches += 1
            event = os.environ.get("EVENTS", "") == "yes" and EVENTS.get(
                (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], RecordedCrossEntropy.batches)
            )
            if event:
                os.kill(os.getpid(), event)
        return loss, size, output
"""
TRAIN = [
    *("--arch", "transformer", "--attention", "mixhead-b", "--criterion", "recorded_cross_entropy", "--cpu"),
    *("--encoder-layers", "1", "--decoder-layers", "1", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16"),
    *("--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16", "--dropout", "0", "--optimizer", "adam"),
    *("--mixing-orthogonality", "0.01", "--row-space-penalty", "0.01", "--column-space-penalty", "0.01"),
    *(
        "--lr",
        "0.01",
        "--batch-size",
        "12",
        "--required-batch-size-multiple",
        "1",
        "--num-workers",
        "0",
        "--no-progress-bar",
        "--disable-validation",
    ),
]
LAUNCHER = ["-m", "fairseq_lowrank.cli", "launch", "--workers", "2", "--", "fairseq-train"]
STOPPED = 7  # updates


@pytest.fixture(scope="module")
def trainings(translation_data, tmp_path_factory, warm_python):
    """Folders of a training by one process with --update-freq 2, of one by two workers, and of one that is stopped.

    An epoch is 20 batches, so 10 updates; all end after it. In the third training, a worker is killed in the sixth update,
    and all start again from the checkpoint after the fourth. A signal to one worker then stops both, and they resume.
    """
    folder = tmp_path_factory.mktemp("launch")
    plugin = folder / "recorder"
    plugin.mkdir()
    (plugin / "__init__.py").write_text(RECORDER)

    def train(name, *command, **variables):
        (folder / name).mkdir(exist_ok=True)
        variables |= {"PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1", "RECORDS": str(folder / name)}
        return subprocess.run(
            [
                *(warm_python / "python", *command, translation_data, *TRAIN, "--user-dir", plugin),
                *("--save-dir", folder / name / "checkpoints", "--max-update", "10"),
            ],
            check=True,
            env=os.environ | variables,
            capture_output=True,
            text=True,
        )

    train("one", "-m", "fairseq_cli.train", "--update-freq", "2")
    log = train("two", *LAUNCHER, "--save-interval-updates", str(STOPPED)).stdout
    assert log.count("--ddp-backend pytorch_ddp needs a GPU; the workers use legacy_ddp") == 1
    restarting = [*LAUNCHER[:3], "--max-restarts", "1", *LAUNCHER[3:]]
    said = train("stopped", *restarting, "--save-interval-updates", "2", EVENTS="yes").stderr
    assert said.splitlines()[-1].startswith("train.py: SIGUSR1: stopped after a whole update."), said
    saved = folder / "stopped" / "checkpoints" / "checkpoint_last.pt"
    shutil.copy(saved, saved.with_name(f"checkpoint_1_{STOPPED}.pt"))
    train("stopped", *LAUNCHER)
    return folder / "one", folder / "two", folder / "stopped"


def records(folder: Path, worker: int) -> list[dict]:
    return [json.loads(line) for line in (folder / str(worker)).read_text().splitlines()]


def test_two_workers_train_as_one_process_with_twice_the_batches(trainings):
    one, two, _ = trainings
    batches = records(one, 0)
    expected = list(zip(batches[0::2], batches[1::2], strict=True))
    actual = list(zip(records(two, 0), records(two, 1), strict=True))
    assert len(actual) == len(expected) == 10
    for batches in zip(actual, expected, strict=True):
        losses = [sum(b["loss"] for b in update) / sum(b["size"] for b in update) for update in batches]
        assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_two_workers_end_with_the_parameters_of_one_process(trainings):
    one, two = (
        checkpoint_utils.load_checkpoint_to_cpu(folder / "checkpoints" / "checkpoint_last.pt")["model"]
        for folder in trainings[:2]
    )
    assert one.keys() == two.keys()
    for name, parameter in one.items():
        torch.testing.assert_close(two[name], parameter, atol=1e-4, rtol=0)


@pytest.mark.parametrize("update", [STOPPED, 10])
def test_killed_and_stopped_workers_have_the_numbers_of_unbroken_ones(trainings, update):
    names = {STOPPED: f"checkpoint_1_{STOPPED}.pt", 10: "checkpoint_last.pt"}
    unbroken, stopped = (load_checkpoint(folder / "checkpoints" / names[update]) for folder in trainings[1:])
    assert stopped["optimizer_history"][-1]["num_updates"] == update
    for name in ("model", "last_optimizer_state"):
        torch.testing.assert_close(stopped[name], unbroken[name], atol=0, rtol=0)
    positions = [state["extra_state"]["train_iterator"] for state in (stopped, unbroken)]
    assert positions[0] == positions[1]


def test_two_workers_see_different_sentences_and_together_all_of_them(trainings):
    _, two, _ = trainings
    first, second = ([i for batch in records(two, worker) for i in batch["ids"]] for worker in (0, 1))
    assert not set(first) & set(second)
    assert sorted(first + second) == list(range(240))


def test_reason_of_the_first_worker_is_the_last_line(trainings, translation_data, warm_python):
    _, two, _ = trainings
    flags = ["cross_entropy" if word == "recorded_cross_entropy" else word for word in TRAIN]
    command = [warm_python / "python", *LAUNCHER, translation_data, *flags, "--attention", "mixhead-a"]
    ended = subprocess.run(
        [*command, "--save-dir", two / "checkpoints", "--max-update", "30"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    last = ended.stderr.splitlines()[-1]
    assert ended.returncode == 2 and last.startswith("fairseq-lowrank launch: error: worker "), ended.stderr
    assert "checkpoint_last.pt does not fit the model" in last and "Train with --attention mixhead-b" in last
    assert "ChildFailedError" not in ended.stderr


@pytest.mark.parametrize(
    ("exit_code", "code", "line"),
    [
        (2, 2, "ended with code 2, see above"),
        (-9, 1, "ended by signal 9; often: out of memory"),
        (-11, 1, "ended by signal 11"),
    ],
)
def test_worker_without_a_message_is_reported_by_its_end(capsys, exit_code, code, line):
    assert report_failure(1, ProcessFailure(1, 1, exit_code, "")) == code
    assert capsys.readouterr().err == f"fairseq-lowrank launch: error: worker 1: {line}\n"


@pytest.mark.parametrize(
    ("number", "ended", "code"), [(signal.SIGUSR1, 2, 0), (signal.SIGUSR1, 1, 138), (signal.SIGTERM, 2, 143)]
)
def test_signal_to_the_launcher_is_its_code(monkeypatch, tmp_path, number, ended, code):
    def stop(_):
        for rank in range(ended):
            (tmp_path / str(rank)).touch()
        raise SignalException("", sigval=number)

    monkeypatch.setattr("torch.distributed.run.run", stop)
    assert run_workers(["--nproc-per-node", "2", "-m", "fairseq_cli.train"], tmp_path, 2) == code


def launch(capsys, *arguments) -> list[str]:
    assert cli.main(["launch", "--dry-run", *arguments]) == 0
    return capsys.readouterr().out.split()


def test_the_environment_of_workers_ends_with_them(monkeypatch):
    before, seen = dict(os.environ), {}

    def run(words, ended, count):
        seen.update(os.environ)
        raise KeyboardInterrupt

    monkeypatch.setattr("fairseq_lowrank.cli.launch.run_workers", run)
    assert cli.main(["launch", "--workers", "2", "--", "fairseq-train", "data", "--cpu"]) == 130
    assert seen.items() - before.items() and seen["LOWRANK_LAUNCHER"] == str(os.getpid())
    assert dict(os.environ) == before  # else a training of this process would resume what these workers saved


def test_the_command_is_torchrun_with_the_plugin(capsys):
    command = launch(capsys, "--workers", "2", "--", "/some/where/fairseq-train", "data", "--cpu")
    assert command[1:6] == ["-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node"]
    assert command[6:] == ["2", "--standalone", "-m", "fairseq_cli.train", "data", "--cpu", "--user-dir", str(PACKAGE)]


def test_a_user_dir_that_is_given_stays(capsys):
    command = launch(capsys, "--workers", "2", "--", "fairseq-train", "data", "--cpu", "--user-dir=mine")
    assert command[-3:] == ["data", "--cpu", "--user-dir=mine"]


def test_several_machines_meet_at_the_rendezvous(capsys):
    flags = ["--workers", "2", "--nodes", "3", "--rendezvous", "node1:29500", "--", "fairseq-train", "data", "--cpu"]
    command = " ".join(launch(capsys, *flags))
    assert "--nnodes 3 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint node1:29500" in command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "2"], "after -- comes fairseq-train and its arguments, not nothing"),
        (["--workers", "2", "--", "fairseq-generate", "data"], "not fairseq-generate"),
        (["--workers", "2", "--", "fairseq-validate", "data"], "not fairseq-validate"),
        (["--workers", "0", "--", "fairseq-train", "data", "--cpu"], "--workers 0: expected a number >= 1"),
        (["--workers", "2", "--nodes", "2", "--", "fairseq-train"], "--nodes above 1 and --rendezvous HOST:PORT"),
        (["--workers", "2", "--rendezvous", "a:1", "--", "fairseq-train"], "--nodes above 1 and --rendezvous"),
    ],
)
def test_what_cannot_be_launched_is_refused_in_one_line(capsys, arguments, message):
    assert cli.main(["launch", "--dry-run", *arguments]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_workers_are_one_for_each_gpu_and_no_more(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert launch(capsys, "--", "fairseq-train", "data")[6] == "4"
    assert cli.main(["launch", "--dry-run", "--workers", "5", "--", "fairseq-train", "data"]) == 2
    assert "--workers 5: this machine has 4 GPUs" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli.main(["launch", "--dry-run", "--", "fairseq-train", "data"]) == 2
    assert "--workers: missing, and this machine has no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("stopped", [False, True], ids=["ends", "stopped"])
def test_slurm_script_of_the_docs_trains_and_queues_again(tmp_path, capsys, stopped):
    page = (PACKAGE.parent / "docs" / "long-trainings.md").read_text()
    script = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", page, re.DOTALL)[1]
    assert re.search(r"^#SBATCH --signal=B:USR1@\d+$", script, re.MULTILINE)
    programs = {
        "scontrol": 'if [ "$1" = show ]; then echo node1; echo node2; else echo "$@" >> requeued; fi',
        # Slurm signals the script while the training runs, which then takes a moment to write its checkpoint
        "srun": f'{"kill -USR1 $PPID; sleep 0.3;" * stopped} exec "$@"',
        "fairseq-lowrank": 'printf "%s\\n" "$@" > command',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\ntrap '' USR1\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}
    environment = os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, check=True, timeout=60)
    name, *words = (tmp_path / "command").read_text().splitlines()
    assert name == "launch"
    command = " ".join(launch(capsys, *words))
    assert "--nnodes 2 --nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint node1:29500" in command
    assert (tmp_path / "requeued").exists() == stopped
