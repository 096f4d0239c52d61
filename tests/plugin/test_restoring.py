"""Checkpoints are replaced in one step, and a checkpoint that does not fit is refused with the flag to add."""

import errno
import shutil

import pytest

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from fairseq_lowrank import plugin  # noqa: F401 (what --user-dir brings)
from fairseq_lowrank.messages import InvalidCheckpoint, StateDictMismatch, user_error

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
def refused(train, capsys):
    """``refused(*flags)``: the error of a training that cannot load its checkpoint."""

    def refused(*flags, kind=StateDictMismatch, **options):
        with pytest.raises(SystemExit) as exit:
            train(*flags, **options)
        error = user_error(exit.value)
        assert (type(error), exit.value.code) == (kind, 2)
        assert str(error) in capsys.readouterr().err
        return error

    return refused


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_copy_that_is_cut_short_leaves_the_old_checkpoint(train, tmp_path, monkeypatch, stop):
    train(*STOCK, "--max-epoch", 1)

    def cut_short(source, target):
        with open(source, "rb") as whole, open(target, "wb") as half:
            half.write(whole.read(1000))
        raise stop

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", cut_short)
        with pytest.raises(SystemExit if isinstance(stop, Exception) else type(stop)):
            train(*STOCK, "--max-epoch", 2)
    assert sorted(path.name for path in (tmp_path / "run").glob("[!.]*")) == [
        *("checkpoint1.pt", "checkpoint2.pt", "checkpoint_last.pt")
    ]
    assert "checkpoint_last.pt (epoch 2 @ " in train(*STOCK, "--max-epoch", 2)


def test_copy_is_the_file_and_leaves_no_other(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"new")
    target.write_bytes(b"old, and longer")
    assert PathManager.copy(str(source), str(target), overwrite=True)
    assert target.read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_resume_names_the_newest_intact_checkpoint(train, refused, tmp_path):
    train(*STOCK)
    folder = tmp_path / "run"
    for name in "checkpoint_last.pt", "checkpoint3.pt":
        (folder / name).write_bytes((folder / name).read_bytes()[:1000])
    error = refused(*STOCK, kind=InvalidCheckpoint)
    assert error.path == str(folder / "checkpoint_last.pt")
    assert error.remedy.endswith(f"--restore-file {folder / 'checkpoint2.pt'}")
    assert "checkpoint2.pt (epoch 3 @ " in train(*STOCK, "--restore-file", folder / "checkpoint2.pt")
    assert checkpoint_utils.load_checkpoint_to_cpu(folder / "checkpoint_last.pt")


@pytest.mark.parametrize("flags", [[], ["--restore-file", "{last}"]], ids=["no other", "another flag"])
def test_resume_names_no_checkpoint_that_would_not_help(train, refused, tmp_path, flags):
    last = tmp_path / "run" / "checkpoint_last.pt"
    train(*STOCK, *(["--no-epoch-checkpoints"] if not flags else []))
    last.write_bytes(last.read_bytes()[:1000])
    error = refused(*STOCK, *(flag.format(last=last) for flag in flags), kind=InvalidCheckpoint)
    assert (error.path, error.remedy) == (str(last), "Copy or download it again.")


@pytest.mark.parametrize(
    ("flags", "differing"),
    [
        (["--arch", "lowrank_transformer", "--attention", "mixhead-a"], "--attention mixhead-b"),
        (STOCK, "--arch lowrank_transformer, --attention mixhead-b"),
    ],
    ids=["mixhead-a", "stock"],
)
def test_resume_names_the_flags_that_differ(train, refused, tmp_path, flags, differing):
    train(*MIXHEAD, "--max-epoch", 1)
    mixhead = tmp_path / "run" / "checkpoint_last.pt"
    for where, folder in (("--finetune-from-model", "other"), ("--restore-file", "other"), (None, "run")):
        error = refused(*flags, *([where, mixhead] if where else []), folder=folder)
        assert error.path == str(mixhead)
        assert error.name.endswith("layers.0.self_attn")
        assert error.saved["mixing"] == "positionwise"
        assert error.remedy.startswith(f"Train with {differing}")
        assert ("--save-dir" in error.remedy) == (where is None)


def test_resume_names_the_shapes_that_differ(train, refused, tmp_path):
    train(*STOCK, "--max-epoch", 1)
    error = refused(*STOCK, "--encoder-ffn-embed-dim", 24)
    assert error.path == str(tmp_path / "run" / "checkpoint_last.pt")
    assert (error.name, error.saved, error.current) == ("encoder.layers.0.fc1.weight", (16, 16), (24, 16))


def test_stock_attention_refuses_a_state_whose_weights_fit(train, refused, tmp_path):
    train("--arch", STOCK[1], "--attention-activation", "sigsoftmax", "--max-epoch", 1)
    for more in {}, {"folder": "other"}:
        last = ["--finetune-from-model", tmp_path / "run" / "checkpoint_last.pt"] if more else []
        error = refused(*STOCK, *last, **more)
        assert (error.saved, error.current) == ({"activation": "sigsoftmax"}, {"activation": "softmax"})
    # fairseq's own function loads
    train("--arch", STOCK[1], "--attention", "mha", "--max-epoch", 1, folder="plain")
    log = train(*STOCK, "--finetune-from-model", tmp_path / "plain" / "checkpoint_last.pt", folder="third")
    assert "loading pretrained model from" in log


def test_resume_names_the_flag_that_leaves_the_optimizer_out(train, refused, tmp_path):
    train(*STOCK, "--max-epoch", 1)
    stock = tmp_path / "run" / "checkpoint_last.pt"
    restore = ["--restore-file", stock, "--max-epoch", 2]
    error = refused(*MIXHEAD, *restore, folder="other")
    assert error.path == str(stock)
    assert sum(error.current) > sum(error.saved) > 0
    assert "--reset-optimizer" in error.remedy
    log = train(*MIXHEAD, *restore, "--reset-optimizer", folder="other")
    assert "checkpoint_last.pt (epoch 2 @ 0 updates)" in log
    assert "end of epoch 2" in log
    log = train(*MIXHEAD, *restore, "--reset-optimizer", "--reset-dataloader", folder="third")
    assert "end of epoch 1" in log
