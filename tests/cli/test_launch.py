"""fairseq-lowrank launch: several workers train as one process with larger updates."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import fairseq_lowrank
from fairseq_lowrank import cli
from fairseq_lowrank.cli.launch import report_failure

PACKAGE = Path(fairseq_lowrank.__file__).resolve().parent

# A user's own plugin. Its criterion writes down the sentences and the loss of each training batch, for each worker.
RECORDER = """
import json, os
from pathlib import Path

import fairseq_lowrank
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig


@register_criterion("recorded_cross_entropy", dataclass=CrossEntropyCriterionConfig)
class RecordedCrossEntropy(CrossEntropyCriterion):
    def forward(self, model, sample, reduce=True):
        loss, size, output = super().forward(model, sample, reduce)
        if model.training:
            line = {"ids": sample["id"].tolist(), "loss": loss.item(), "size": size}
            path = Path(os.environ["RECORDS"]) / os.environ.get("RANK", "0")
            with path.open("a") as file:
                file.write(json.dumps(line) + "\\n")
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
LAUNCHER = [sys.executable, "-m", "fairseq_lowrank.cli", "launch", "--workers", "2", "--", "fairseq-train"]


@pytest.fixture(scope="module")
def trainings(translation_data, tmp_path_factory):
    """Folders of a training by one process with --update-freq 2, and of one by two workers that stops and resumes.

    An epoch is 20 batches, so 10 updates. The workers stop after 9 updates; both end after 20.
    """
    folder = tmp_path_factory.mktemp("launch")
    plugin = folder / "recorder"
    plugin.mkdir()
    (plugin / "__init__.py").write_text(RECORDER)

    def train(name, updates, *command):
        (folder / name).mkdir(exist_ok=True)
        subprocess.run(
            [
                *(*command, translation_data, *TRAIN, "--user-dir", plugin),
                *("--save-dir", folder / name / "checkpoints", "--max-update", str(updates)),
            ],
            check=True,
            env=os.environ | {"PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1", "RECORDS": str(folder / name)},
        )

    train("one", 20, sys.executable, "-m", "fairseq_cli.train", "--update-freq", "2")
    train("two", 9, *LAUNCHER)
    train("two", 20, *LAUNCHER)
    return folder / "one", folder / "two"


def records(folder: Path, worker: int) -> list[dict]:
    return [json.loads(line) for line in (folder / str(worker)).read_text().splitlines()]


def test_two_workers_train_and_resume_as_one_process_with_twice_the_batches(trainings):
    one, two = trainings
    batches = records(one, 0)
    expected = list(zip(batches[0::2], batches[1::2], strict=True))
    actual = list(zip(records(two, 0), records(two, 1), strict=True))
    assert len(actual) == len(expected) == 20
    for batches in zip(actual, expected, strict=True):
        losses = [sum(b["loss"] for b in update) / sum(b["size"] for b in update) for update in batches]
        assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_two_workers_end_with_the_parameters_of_one_process(trainings):
    one, two = (
        checkpoint_utils.load_checkpoint_to_cpu(folder / "checkpoints" / "checkpoint_last.pt")["model"]
        for folder in trainings
    )
    assert one.keys() == two.keys()
    for name, parameter in one.items():
        torch.testing.assert_close(two[name], parameter, atol=1e-4, rtol=0)


def test_two_workers_see_different_sentences_and_together_all_of_them(trainings):
    _, two = trainings
    first, second = ([i for batch in records(two, worker)[:10] for i in batch["ids"]] for worker in (0, 1))
    assert not set(first) & set(second)
    assert sorted(first + second) == list(range(240))


def test_reason_of_the_first_worker_is_the_last_line(trainings, translation_data):
    _, two = trainings
    flags = ["cross_entropy" if word == "recorded_cross_entropy" else word for word in TRAIN]
    command = [*LAUNCHER, translation_data, *flags, "--attention", "mixhead-a"]
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
    ("exit_codes", "code", "line"),
    [([2, -15], 2, "worker 0: ended with code 2, see above"), ([-9], 1, "worker 0: Signal 9 (SIGKILL)")],
)
def test_worker_without_a_message_is_reported_by_its_end(capsys, exit_codes, code, line):
    failures = {rank: ProcessFailure(rank, 1, exit_code, "") for rank, exit_code in enumerate(exit_codes)}
    assert report_failure(failures) == code
    assert line in capsys.readouterr().err


def launch(capsys, *arguments) -> list[str]:
    assert cli.main(["launch", "--dry-run", *arguments]) == 0
    return capsys.readouterr().out.split()


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
        (["--workers", "2", "--nodes", "0", "--", "fairseq-train"], "--nodes 0: expected a number >= 1"),
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
