"""A training that resumes equals an uninterrupted one, bit for bit."""

import itertools
import shutil

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils
from fairseq.trainer import Trainer

from fairseq_lowrank import plugin  # noqa: F401 (what --user-dir brings)
from fairseq_lowrank.attention import PRESETS

TRAIN = [
    *("--cpu", "--optimizer", "adam", "--lr", "0.01", "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "5"),
    *("--dropout", "0.3", "--attention-dropout", "0.2", "--update-freq", "2", "--seed", "3", "--num-workers", "0"),
    *("--no-progress-bar", "--clip-norm", "1", "--max-tokens", "150"),
]
DECODER = ["--decoder-layers", "1", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16"]
DECODER += ["--decoder-attention-heads", "4"]
ENCODER = [flag.replace("decoder", "encoder") for flag in DECODER]
BLOCKS = ["--tokens-per-sample", "12"]
STOCK = {
    "translation": [*ENCODER, *DECODER, "--arch", "transformer"],
    "language model": [*DECODER, *("--task", "language_modeling", *BLOCKS, "--arch", "transformer_lm")],
    "masked": [*ENCODER, "--task", "masked_lm", "--criterion", "masked_lm", *BLOCKS, "--arch", "roberta_base"],
}
EPOCH = {"translation": 8, "language model": 9}  # updates
MIXING = [preset for preset in PRESETS if PRESETS[preset].get("mixing", "none") != "none"]


def ours(kind, preset):
    """The flags of a model with mixing in place of the stock one (whose architecture these win over)."""
    return [*STOCK[kind][:-1], f"lowrank_{STOCK[kind][-1]}", "--attention", preset]


@pytest.fixture
def train(fairseq_command, translation_data, language_model_data, tmp_path):
    """``train(flags, folder, *more)``: train and return the last state of model, optimizer and averaged weights."""

    def run(flags, folder, *more, data=None, expect=""):
        data = data or (language_model_data if "--task" in flags else translation_data)
        flags = [*TRAIN, *flags, *more]
        log = fairseq_command("train", data, *flags, "--save-dir", tmp_path / folder, "--no-epoch-checkpoints")
        assert expect in log
        state = checkpoint_utils.load_checkpoint_to_cpu(tmp_path / folder / "checkpoint_last.pt")
        return state["model"], state["last_optimizer_state"], state["extra_state"].get("ema")

    return run


def assert_equal(states, expected):
    torch.testing.assert_close(states, expected, atol=0, rtol=0)


CASES = [("translation", "stock"), ("language model", "mixhead-b"), ("translation", "mixhead-random")]
GRID = [pair for pair in itertools.product(EPOCH, ("stock", *MIXING)) if pair not in CASES]


@pytest.mark.parametrize(("kind", "model"), [*CASES, *(pytest.param(*pair, marks=pytest.mark.grid) for pair in GRID)])
def test_resume_equals_a_training_without_a_stop(train, kind, model):
    flags = STOCK[kind] if model == "stock" else ours(kind, model)
    epoch = EPOCH[kind]
    unbroken = train(flags, "unbroken", "--max-update", 3 * epoch, expect="epoch 3 @")
    # in the middle of the first epoch, at its end, twice in the second, and in the third; at every other of these but once
    updates = [3, epoch, epoch + 2, epoch + 5, 2 * epoch + 1, 3 * epoch]
    for update in updates if (kind, model) == CASES[0] else updates[1::2]:
        stopped = train(flags, "stopped", "--max-update", update)
    assert_equal(stopped, unbroken)


@pytest.mark.parametrize("kind", [pytest.param("translation", marks=pytest.mark.grid), "language model"])
def test_resume_equals_a_training_that_was_not_killed(train, kind, monkeypatch):
    flags = [*ours(kind, "mixhead-b"), "--mixing-lr-scale", 3, "--max-update", 2 * EPOCH[kind] + 5]
    flags += ["--save-interval-updates", 3]
    unbroken = train(flags, "unbroken")
    for update in (EPOCH[kind] + 5, 2 * EPOCH[kind] + 2):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "train_step", killed_at(update))
            with pytest.raises(KeyboardInterrupt):
                train(flags, "killed")
    assert_equal(train(flags, "killed"), unbroken)


def killed_at(update):
    step = Trainer.train_step

    def train_step(self, samples):
        if self.get_num_updates() == update:
            raise KeyboardInterrupt
        return step(self, samples)

    return train_step


@pytest.mark.parametrize(
    "flags",
    [
        ["--curriculum", 1, "--store-ema", "--ema-decay", 0.9, "--ema-fp32"],
        ["--update-ordered-indices-seed", "--lr-scheduler", "fixed", "--force-anneal", 2],
        ["--update-epoch-batch-itr", "True", "--skip-remainder-batch"],
        ["--data-buffer-size", 0],
    ],
)
def test_resume_works_with_every_kind_of_batches(train, flags):
    flags = [*STOCK["translation"], *flags]
    last = ["--max-update", 2 * EPOCH["translation"] - 1]
    unbroken = train(flags, "unbroken", *last)
    for stop in (["--max-epoch", 1], ["--max-update", EPOCH["translation"] + 4], last):
        stopped = train(flags, "stopped", *stop)
    assert_equal(stopped, unbroken)


@pytest.mark.parametrize("workers", [0, 1])
def test_resume_draws_the_masks_of_each_epoch(train, workers):
    flags = [*STOCK["masked"], "--num-workers", workers]
    unbroken = train(flags, "unbroken", "--max-update", 21, expect="epoch 3 @ 21")
    for update in (9, 13, 21):
        resumed = train(flags, "stopped", "--max-update", update)
    assert_equal(resumed, unbroken)


def test_resume_keeps_the_shard_of_each_epoch(train, language_model_data, tmp_path):
    second = shutil.copytree(language_model_data, tmp_path / "second")
    for suffix in ("bin", "idx"):
        shutil.copy(language_model_data / f"test.{suffix}", second / f"train.{suffix}")
    flags = [*STOCK["language model"], "--update-freq", 1]
    data = f"{language_model_data}:{second}"
    unbroken = train(flags, "unbroken", "--max-update", 30, data=data, expect="epoch 3 @ 30")
    for update in (18, 19, 25, 30):
        resumed = train(flags, "stopped", "--max-update", update, data=data)
    assert_equal(resumed, unbroken)


def test_resume_within_an_epoch_keeps_the_shard(train, translation_data, tmp_path):
    second = shutil.copytree(translation_data, tmp_path / "second")
    for file in translation_data.glob("valid.*.[bi][id][nx]"):
        shutil.copy(file, second / file.name.replace("valid", "train"))
    flags = [*STOCK["translation"], "--update-freq", 1, "--max-tokens", 40]
    data = f"{second}:{translation_data}"
    unbroken = train(flags, "unbroken", "--max-epoch", 3, data=data)
    for update in (2, 9, 20):
        train(flags, "stopped", "--max-update", update, data=data)
    assert_equal(train(flags, "stopped", "--max-epoch", 3, data=data), unbroken)


def test_reset_dataloader_starts_with_epoch_1(train):
    train(STOCK["translation"], "run", "--max-update", 20)
    train(STOCK["translation"], "run", "--max-update", 24, "--reset-dataloader", expect="epoch 1 @ 24")
