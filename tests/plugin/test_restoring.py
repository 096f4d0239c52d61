"""Checkpoints are replaced whole; what cannot be restored is refused in one line, with the flag to add."""

import errno
import shutil

import pytest

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from fairseq_lowrank import plugin  # noqa: F401 (what --user-dir brings)

TRAIN = [
    *("--cpu", "--optimizer", "adam", "--lr", "0.01", "--num-workers", "0", "--max-tokens", "500", "--no-progress-bar"),
    *("--encoder-layers", "1", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16", "--disable-validation"),
    *("--decoder-layers", "1", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16", "--max-epoch", "3"),
    *("--encoder-attention-heads", "4", "--decoder-attention-heads", "4"),
]
STOCK = ["--arch", "transformer"]
MIXHEAD = ["--arch", "lowrank_transformer", "--attention", "mixhead-b"]


@pytest.fixture
def train(fairseq_command, translation_data, tmp_path):
    def run(*flags, folder="run"):
        return fairseq_command("train", translation_data, *TRAIN, *flags, "--save-dir", tmp_path / folder)

    return run


@pytest.fixture
def refusal(train, capsys):
    """``refusal(*flags)``: the one line in which a training is refused."""

    def line(*flags, **options):
        with pytest.raises((ValueError, SystemExit)) as error:
            train(*flags, **options)
        if error.type is SystemExit:
            assert error.value.code == 2
            return capsys.readouterr().err.splitlines()[-1]
        return str(error.value)

    return line


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_copy_that_is_cut_short_leaves_the_checkpoint_before_it(train, tmp_path, monkeypatch, stop):
    train(*STOCK, "--max-epoch", 1)

    def cut_short(source, target):
        with open(source, "rb") as whole, open(target, "wb") as half:
            half.write(whole.read(1000))
        raise stop

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", cut_short)
        with pytest.raises(SystemExit if isinstance(stop, Exception) else type(stop)):
            train(*STOCK, "--max-epoch", 2)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        *("checkpoint1.pt", "checkpoint2.pt", "checkpoint_last.pt")
    ]
    assert "checkpoint_last.pt (epoch 2 @ " in train(*STOCK, "--max-epoch", 2)


def test_a_copy_is_the_file_and_leaves_nothing_beside_it(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"new")
    target.write_bytes(b"old, and longer")
    assert PathManager.copy(str(source), str(target), overwrite=True)
    assert target.read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_where_the_last_checkpoint_is_damaged_the_newest_whole_one_is_named(train, refusal, tmp_path):
    train(*STOCK)
    folder = tmp_path / "run"
    for name in "checkpoint_last.pt", "checkpoint3.pt":
        (folder / name).write_bytes((folder / name).read_bytes()[:1000])
    line = refusal(*STOCK)
    assert f"{folder / 'checkpoint_last.pt'} cannot be read as a checkpoint" in line
    assert line.endswith(f"To go on from the newest whole one, add --restore-file {folder / 'checkpoint2.pt'}")
    assert "checkpoint2.pt (epoch 3 @ " in train(*STOCK, "--restore-file", folder / "checkpoint2.pt")
    assert checkpoint_utils.load_checkpoint_to_cpu(folder / "checkpoint_last.pt")


def test_without_a_whole_checkpoint_none_is_named(train, refusal, tmp_path):
    train(*STOCK, "--no-epoch-checkpoints")
    last = tmp_path / "run" / "checkpoint_last.pt"
    last.write_bytes(last.read_bytes()[:1000])
    assert "--restore-file" not in refusal(*STOCK)


def test_a_state_of_another_attention_is_refused_with_the_flags_that_it_wants(train, refusal, tmp_path):
    train(*MIXHEAD, "--max-epoch", 1)
    mixhead = tmp_path / "run" / "checkpoint_last.pt"
    start = (
        f"Cannot load model parameters from checkpoint {mixhead}: The checkpoint is of another model: only the checkp"
    )
    other = ["--arch", "lowrank_transformer", "--attention", "mixhead-a"]
    line = refusal(*other, "--finetune-from-model", mixhead, folder="other")
    assert start in line and line.endswith(". Give the flags that it was trained with: --attention mixhead-b")
    line = refusal(*other)
    assert start in line and line.endswith("trained with: --attention mixhead-b, or another --save-dir")
    line = refusal(*STOCK, "--restore-file", mixhead, folder="other")
    assert start in line and line.endswith("trained with: --arch lowrank_transformer, --attention mixhead-b")


def test_stock_attention_refuses_the_state_of_another_function_though_its_weights_fit(train, refusal, tmp_path):
    sigsoftmax = ["--arch", STOCK[1], "--attention-activation", "sigsoftmax"]
    train(*sigsoftmax, "--max-epoch", 1)
    last = tmp_path / "run" / "checkpoint_last.pt"
    said = "was saved with activation=sigsoftmax and is built with softmax"
    assert said in refusal(*STOCK)
    assert said in refusal(*STOCK, "--finetune-from-model", last, folder="other")
    # what is fairseq's own function goes on
    train("--arch", STOCK[1], "--attention", "mha", "--max-epoch", 1, folder="plain")
    log = train(*STOCK, "--finetune-from-model", tmp_path / "plain" / "checkpoint_last.pt", folder="third")
    assert "loading pretrained model from" in log


def test_a_stock_checkpoint_is_restored_by_the_flag_that_its_refusal_names(train, refusal, tmp_path):
    train(*STOCK, "--max-epoch", 1)
    stock = tmp_path / "run" / "checkpoint_last.pt"
    restore = ["--restore-file", stock, "--max-epoch", 2]
    line = refusal(*MIXHEAD, *restore, folder="other")
    assert f"{stock} holds the optimizer's state of other parameters than this model's: add --reset-optimizer" in line
    log = train(*MIXHEAD, *restore, "--reset-optimizer", folder="other")
    assert "checkpoint_last.pt (epoch 2 @ 0 updates)" in log and "end of epoch 2" in log
    log = train(*MIXHEAD, *restore, "--reset-optimizer", "--reset-dataloader", folder="third")
    assert "end of epoch 1" in log


def test_one_stack_can_be_shortened_alone(train, tmp_path):
    layers = ["--encoder-layers", 2, "--decoder-layers", 2, "--max-epoch", 1]
    train(*STOCK, *layers)
    tune = ["--finetune-from-model", tmp_path / "run" / "checkpoint_last.pt", "--encoder-layers-to-keep", "1"]
    assert "loading pretrained model from" in train(*STOCK, *layers, *tune, folder="other")


def test_a_moving_average_that_a_checkpoint_lacks_is_refused_in_a_line(train, refusal, tmp_path):
    train(*STOCK, "--max-epoch", 1)
    tune = ["--finetune-from-model", tmp_path / "run" / "checkpoint_last.pt"]
    line = refusal(*STOCK, *tune, "--store-ema", folder="other")
    assert line.endswith("holds no moving average of the parameters (EMA) to go on with: train without --store-ema")


def test_another_optimizer_is_refused_in_a_line(train, refusal):
    train(*STOCK, "--max-epoch", 1)
    line = refusal(*STOCK, "--optimizer", "nag")
    assert "Optimizer does not match; please reset the optimizer (--reset-optimizer). FairseqAdam vs FairseqNAG" in line
