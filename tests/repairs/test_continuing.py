"""A finished training stays finished, and one in the middle of an epoch continues with its own batches only."""

import shutil

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils
from fairseq.data.iterators import EpochBatchIterator

from fairseq_lowrank.repairs.continuing import BATCHES, OtherBatches
from fairseq_lowrank.repairs.loading import load_checkpoint

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


class Numbers(torch.utils.data.Dataset):
    """A data set of numbers."""

    def __getitem__(self, index):
        return index


OTHER = {
    "max-tokens": (["--max-tokens", "200"], ["--max-tokens 200 (there: 300)"]),
    "batch-size": ([*SMALL, "--batch-size", "4"], ["--batch-size 4 (there: None)"]),
    "seed": ([*SMALL, "--seed", "2"], ["--seed 2 (there: 1)"]),
    "multiple": ([*SMALL, "--required-batch-size-multiple", "1"], ["--required-batch-size-multiple 1"]),
    "remainder": ([*SMALL, "--skip-remainder-batch"], ["--skip-remainder-batch True"]),
    "length": ([*SMALL, "--max-source-positions", "7"], ["--max-source-positions 7 (there: 1024)"]),
    "order": ([*SMALL, "--update-ordered-indices-seed"], ["the data has changed"]),
}


@pytest.mark.parametrize(("flags", "words"), OTHER.values(), ids=OTHER)
def test_other_batches_in_the_middle_of_an_epoch_are_refused(refusal, stopped, translation_data, flags, words):
    line = refusal("train", translation_data, *MIDDLE, *flags, "--max-update", 4, "--save-dir", stopped)
    assert all(word in line for word in (*words, "--reset-dataloader"))
    assert updates(stopped) == 2


@pytest.fixture
def shorter_data(translation_data, tmp_path):
    """Data with the dictionaries of ``translation_data`` and other sentences."""
    folder = shutil.copytree(translation_data, tmp_path / "shorter")
    for file in translation_data.glob("valid.*.[bi][id][nx]"):
        shutil.copy(file, folder / file.name.replace("valid", "train"))
    return folder


def test_other_data_in_the_middle_of_an_epoch_are_refused(
    refusal, fairseq_command, translation_data, shorter_data, tmp_path
):
    run = tmp_path / "run"
    several = f"{shorter_data}:{translation_data}"
    flags = [*MIDDLE, "--batch-size", 8, "--save-dir", run]
    fairseq_command("train", several, *flags, "--max-update", 5)  # 3 updates in the first folder
    for data in (shorter_data, f"{translation_data}:{shorter_data}"):
        line = refusal("train", data, *flags, "--max-update", 6)
        assert f"the data folder {data} (there: {several})" in line and updates(run) == 5
    fairseq_command("train", several, *flags, "--max-update", 6)
    assert updates(run) == 6


def test_copied_data_continue_and_are_named(fairseq_command, stopped, translation_data, tmp_path):
    copy = shutil.copytree(translation_data, tmp_path / "copy")
    said = fairseq_command("train", copy, *MIDDLE, *SMALL, "--max-update", 3, "--save-dir", stopped)
    assert f"the data folder is {copy}" in said and updates(stopped) == 3


def test_changed_data_in_the_middle_of_an_epoch_are_refused(
    refusal, fairseq_command, translation_data, shorter_data, tmp_path
):
    data = shutil.copytree(translation_data, tmp_path / "data")
    flags = [data, *MIDDLE, *SMALL, "--save-dir", tmp_path / "run"]
    fairseq_command("train", *flags, "--max-update", 2)
    shutil.copytree(shorter_data, data, dirs_exist_ok=True)
    assert "the data has changed" in refusal("train", *flags, "--max-update", 3)


def test_checkpoint_without_a_hash_is_compared_by_its_flags(refusal, fairseq_command, stopped, translation_data):
    path = stopped / "checkpoint_last.pt"
    state = load_checkpoint(path)
    del state["extra_state"]["train_iterator"][BATCHES]
    torch.save(state, path)
    train = ["train", translation_data, *MIDDLE, "--save-dir", stopped, "--max-update", 3]
    assert "--max-tokens 200 (there: 300)" in refusal(*train, "--max-tokens", "200")
    fairseq_command(*train, *SMALL)
    assert updates(stopped) == 3


def test_another_number_of_workers_is_refused():
    batches = [[number] for number in range(20)]
    one = EpochBatchIterator(Numbers(), list, batches)
    numbers = one.next_epoch_itr()
    next(numbers), next(numbers)
    state = one.state_dict()
    EpochBatchIterator(Numbers(), list, batches).load_state_dict(state)
    with pytest.raises(OtherBatches):
        EpochBatchIterator(Numbers(), list, batches, num_shards=2).load_state_dict(state)


@pytest.mark.parametrize("grouped", [False, True])
def test_workers_continue_with_an_odd_number_of_batches(grouped):
    def iterator(state=None):
        batches = [[number] for number in range(11)]
        found = EpochBatchIterator(Numbers(), list, batches, num_shards=2, grouped_shuffling=grouped)
        if state:
            found.load_state_dict(state)
        return found

    unbroken = list(iterator().next_epoch_itr())
    state, seen = None, []
    for _ in range(3):
        process = iterator(state)
        numbers = process.next_epoch_itr()
        seen.append(next(numbers))
        state = process.state_dict()
    assert seen == unbroken[:3]
    with pytest.raises(OtherBatches):
        iterator(state | {"epoch": 2})


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


def rate(folder) -> float:
    """Return the learning rate of the last update."""
    state = checkpoint_utils.load_checkpoint_to_cpu(str(folder / "checkpoint_last.pt"))
    return state["last_optimizer_state"]["param_groups"][0]["lr"]


@pytest.mark.parametrize("first", [2, 3])
def test_resumed_training_lowers_the_rate_on_the_same_plateau(train_with, tmp_path, first):
    losses = [3, 4, 5, 6]
    flags = ["--lr", 0.25, "--lr-scheduler", "reduce_lr_on_plateau", "--lr-shrink", 0.5, "--lr-patience", 1]
    train_with(tmp_path, losses[:first], *flags)
    assert rate(tmp_path) == 0.25
    train_with(tmp_path, losses[first:] + losses[:first], *flags)
    assert epochs(tmp_path) == 4 and rate(tmp_path) == 0.125
