"""A finished training stays finished, and one in the middle of an epoch continues with its own batches only."""

from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils
from omegaconf import OmegaConf

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.repairs.continuing import SETTINGS, refuse_other_batches

MIDDLE = [
    *("--arch", "transformer", "--encoder-layers", "1", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16"),
    *("--encoder-attention-heads", "2", "--decoder-layers", "1", "--decoder-embed-dim", "16"),
    *("--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "2", "--optimizer", "adam"),
    *("--cpu", "--num-workers", "0", "--save-interval-updates", "2"),
]
SMALL = ["--max-tokens", "300"]


@pytest.fixture
def stopped(fairseq_command, translation_data, tmp_path):
    """The folder of a training that was stopped after 2 updates, in the middle of epoch 1."""
    fairseq_command("train", translation_data, *MIDDLE, *SMALL, "--max-update", 2, "--save-dir", tmp_path)
    return tmp_path


def updates(folder) -> int:
    state = checkpoint_utils.load_checkpoint_to_cpu(str(folder / "checkpoint_last.pt"))
    return state["optimizer_history"][-1]["num_updates"]


@pytest.mark.parametrize(
    "arch", [[], ["--arch", "lowrank_transformer", "--attention", "mixhead-b"]], ids=["stock", "ours"]
)
def test_finished_training_ends_at_once(fairseq_command, translation_data, tmp_path, arch):
    train = [translation_data, *MIDDLE, *SMALL, *arch, "--max-update", 2, "--save-dir", tmp_path]
    fairseq_command("train", *train)
    before = (tmp_path / "checkpoint_last.pt").read_bytes()
    said = fairseq_command("train", *train)
    assert "--max-update is 2" in said and "done training" in said
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == before
    fairseq_command("train", *train, "--max-update", 3)
    assert updates(tmp_path) == 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-tokens", "200"], ["--max-tokens 200", "--max-tokens 300"]),
        ([*SMALL, "--batch-size", "4"], ["--batch-size 4", "--batch-size None"]),
        ([*SMALL, "--seed", "2"], ["--seed 2", "--seed 1"]),
        ([*SMALL, "--required-batch-size-multiple", "1"], ["--required-batch-size-multiple 1"]),
    ],
    ids=["max-tokens", "batch-size", "seed", "multiple"],
)
def test_other_batches_in_the_middle_of_an_epoch_are_refused(refusal, stopped, translation_data, flags, words):
    line = refusal("train", translation_data, *MIDDLE, *flags, "--max-update", 4, "--save-dir", stopped)
    assert all(word in line for word in (*words, "--reset-dataloader"))
    assert updates(stopped) == 2


def test_another_number_of_workers_is_refused(stopped):
    """What a trainer of two workers gets of the checkpoint of one."""
    config = OmegaConf.create(
        {
            "distributed_training": {"distributed_world_size": 2},
            "checkpoint": {"reset_dataloader": False, "finetune_from_model": None},
        }
    )

    def load(trainer, filename):
        return checkpoint_utils.load_checkpoint_to_cpu(filename)["extra_state"]

    path = str(stopped / "checkpoint_last.pt")
    with pytest.raises(UserError) as refused:
        refuse_other_batches(load)(SimpleNamespace(cfg=config), path)
    assert "--distributed-world-size 2" in str(refused.value) and "--distributed-world-size 1" in str(refused.value)
    assert SETTINGS not in load(None, path)


@pytest.mark.parametrize(
    "flags", [SMALL, [*SMALL, "--update-freq", "2"], ["--max-tokens", "200", "--reset-dataloader"]]
)
def test_training_continues_in_the_middle_of_an_epoch(fairseq_command, stopped, translation_data, flags):
    fairseq_command("train", translation_data, *MIDDLE, *flags, "--max-update", 3, "--save-dir", stopped)
    assert updates(stopped) == 3


def test_other_batches_between_epochs_are_taken(fairseq_command, translation_data, tmp_path):
    train = [translation_data, *MIDDLE, "--save-dir", tmp_path]
    fairseq_command("train", *train, *SMALL, "--max-epoch", 1)
    before = updates(tmp_path)
    fairseq_command("train", *train, "--max-tokens", "200", "--max-epoch", 2)
    assert updates(tmp_path) > before


@pytest.fixture
def train_with(fairseq_command, translation_data, monkeypatch):
    """Train with given validation losses, one an epoch; return what was logged."""
    import fairseq_cli.train

    def run(folder, losses, *flags):
        values = iter(losses)
        monkeypatch.setattr(fairseq_cli.train, "validate", lambda *_: [float(next(values))])
        return fairseq_command(
            *("train", translation_data, *MIDDLE, "--batch-size", 80, "--no-epoch-checkpoints"),
            *("--save-interval-updates", 0, "--max-epoch", len(losses), "--save-dir", folder, *flags),
        )

    return run


def epochs(folder) -> int:
    return updates(folder) // 3


def test_runs_of_one_process_have_their_own_patience_and_best_value(train_with, tmp_path):
    train_with(tmp_path / "first", [3, 2, 1, 4], "--patience", 1)
    train_with(tmp_path / "second", [7, 6, 5], "--patience", 1)
    assert (epochs(tmp_path / "first"), epochs(tmp_path / "second")) == (4, 3)
    best = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "second" / "checkpoint_best.pt"))
    assert best["extra_state"]["best"] == best["extra_state"]["val_loss"] == 5


def test_resumed_training_continues_to_count_patience(train_with, tmp_path):
    train_with(tmp_path, [3, 4], "--patience", 2)
    train_with(tmp_path, [3.5] * 4, "--patience", 2)
    assert epochs(tmp_path) == 3
    train_with(tmp_path, [3.5] * 5, "--patience", 3)
    assert epochs(tmp_path) == 4


def test_training_that_patience_stopped_ends_at_once(train_with, tmp_path):
    train_with(tmp_path, [3, 4, 0], "--patience", 1)
    assert epochs(tmp_path) == 2
    before = (tmp_path / "checkpoint_last.pt").read_bytes()
    assert "--patience is 1" in train_with(tmp_path, [0] * 5, "--patience", 1)
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == before
    train_with(tmp_path, [0] * 4, "--patience", 1, "--reset-meters")
    assert epochs(tmp_path) == 4
