"""A checkpoint is written whole or not at all, and by one training."""

import fcntl
import os
import subprocess
import sys

import pytest
import torch
from full_disk import full_disk

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer

from fairseq_lowrank.repairs import checkpoints, commands
from fairseq_lowrank.repairs.checkpoints import CheckpointNotWritten
from fairseq_lowrank.repairs.loading import load_checkpoint

TRAIN = [
    *("--arch", "transformer", "--encoder-layers", "1", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16"),
    *("--encoder-attention-heads", "2", "--decoder-layers", "1", "--decoder-embed-dim", "16"),
    *("--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "2", "--optimizer", "adam", "--batch-size", "40"),
    *("--cpu", "--num-workers", "0", "--no-epoch-checkpoints", "--disable-validation"),
]


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != checkpoints.LOCK)


def test_training_ends_in_one_line_and_resumes_after_space_is_freed(
    fairseq_command, refusal, translation_data, tmp_path
):
    train = ["train", translation_data, *TRAIN, "--save-dir", tmp_path]
    fairseq_command(*train, "--max-update", 2)
    before = (tmp_path / "checkpoint_last.pt").read_bytes()
    with full_disk(20_000):
        line = refusal(*train, "--max-update", 4)
    assert f"{tmp_path / 'checkpoint_last.pt'} cannot be written: File too large. Free some space" in line
    assert names(tmp_path) == ["checkpoint_last.pt"]
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == before
    fairseq_command(*train, "--max-update", 4)
    assert load_checkpoint(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 4


@pytest.mark.parametrize("write", ["save", "copy"])
def test_unfinished_checkpoint_replaces_no_whole_one(tmp_path, write):
    source, target = tmp_path / "source.pt", tmp_path / "target.pt"
    torch.save(torch.zeros(10_000), source)
    target.write_text("older")
    with full_disk(10_000), pytest.raises(CheckpointNotWritten, match=r"target\.pt cannot be written: File too large"):
        if write == "save":
            checkpoint_utils.torch_persistent_save(torch.zeros(10_000), str(target))
        else:
            PathManager.copy(str(source), str(target), overwrite=True)
    assert target.read_text() == "older" and names(tmp_path) == ["source.pt", "target.pt"]


def test_fault_of_the_program_is_no_full_disk(tmp_path):
    with pytest.raises(Exception, match="pickle") as raised:
        checkpoint_utils.torch_persistent_save(lambda: None, str(tmp_path / "a.pt"))
    assert not isinstance(raised.value, CheckpointNotWritten) and not names(tmp_path)


def test_folder_that_cannot_be_written_is_named(refusal, translation_data, tmp_path):
    (tmp_path / "file").touch()
    line = refusal("train", translation_data, *TRAIN, "--max-update", 1, "--save-dir", tmp_path / "file" / "run")
    assert f"--save-dir {tmp_path / 'file' / 'run'}: Not a directory" in line


def test_worker_with_a_full_disk_for_its_report_still_ends_in_a_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with full_disk(5), pytest.raises(SystemExit):
        commands.end(CheckpointNotWritten("a.pt", "No space left on device"))
    assert capsys.readouterr().err.endswith("a.pt cannot be written: No space left on device. Free some space there, and "
                                            "give the same command again.\n")  # fmt: skip


LOCKING = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("process 7 on node1", file=file, flush=True)
print("locked", flush=True)
sys.stdin.read()
"""


def test_second_training_into_a_folder_is_refused_until_the_first_ends(
    refusal, fairseq_command, translation_data, tmp_path, monkeypatch
):
    train = ["train", translation_data, *TRAIN, "--max-update", 1, "--save-dir", tmp_path]
    command = [sys.executable, "-c", LOCKING, tmp_path / checkpoints.LOCK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        line = refusal(*train)
        assert f"--save-dir {tmp_path}: another training (process 7 on node1) writes into this folder" in line
        assert names(tmp_path) == []
        fairseq_command(*train, "--no-save")
    load, held = Trainer.load_checkpoint, []

    def note(self, *args, **kwargs):
        held.append((tmp_path / checkpoints.LOCK).read_text())
        return load(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "load_checkpoint", note)
    fairseq_command(*train)
    assert [text.startswith(f"process {os.getpid()} on ") for text in held] == [True]
    # the process lives on, and another one may train into the folder
    assert not (tmp_path / checkpoints.LOCK).exists() and not checkpoints._locks


def test_disk_without_locks_is_a_warning(monkeypatch, tmp_path, caplog):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    checkpoints._lock(tmp_path, "")
    assert f"{tmp_path} cannot be locked (No locks available)" in caplog.text
