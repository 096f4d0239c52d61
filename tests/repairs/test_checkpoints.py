"""Trainings write every checkpoint that is due and keep the best ones."""

import pytest

pytest.importorskip("fairseq")

import fairseq_cli.train
from fairseq import checkpoint_utils

TRAIN = [
    *("--cpu", "--optimizer", "adam", "--lr", "0.01", "--num-workers", "0", "--batch-size", "80", "--no-progress-bar"),
    *("--encoder-layers", "1", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16"),
    *("--decoder-layers", "1", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16"),
    *("--encoder-attention-heads", "4", "--decoder-attention-heads", "4"),
]
MODELS = {"stock": ("transformer",), "mixhead-b": ("lowrank_transformer", "--attention", "mixhead-b")}


@pytest.fixture(params=MODELS)
def arch(request):
    return MODELS[request.param]


@pytest.fixture
def train(fairseq_command, translation_data, tmp_path, arch):
    """Train with 3 updates an epoch; return the names of the checkpoints."""

    def run(*flags):
        fairseq_command("train", translation_data, *TRAIN, "--arch", *arch, *flags, "--save-dir", tmp_path)
        return {path.name for path in tmp_path.glob("*.pt")}

    return run


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--no-epoch-checkpoints"], {"checkpoint_1_3.pt", "checkpoint_2_6.pt", "checkpoint_3_9.pt"}),
        (["--no-epoch-checkpoints", "--keep-interval-updates", 2], {"checkpoint_2_6.pt", "checkpoint_3_9.pt"}),
        (["--save-interval", 2], {"checkpoint_1_3.pt", "checkpoint2.pt", "checkpoint_3_9.pt"}),
        ([], {"checkpoint1.pt", "checkpoint2.pt", "checkpoint3.pt"}),
    ],
    ids=["plain", "two-kept", "every-second-epoch", "epochs"],
)
def test_interval_checkpoint_is_written_at_end_of_epoch(train, flags, names):
    flags = ["--disable-validation", "--no-last-checkpoints", "--max-epoch", 3, *flags]
    assert train("--save-interval-updates", 3, *flags) == names


def test_interval_checkpoint_at_end_of_epoch_resumes(train, tmp_path):
    flags = ["--disable-validation", "--no-epoch-checkpoints", "--save-interval-updates", 3]
    train(*flags, "--max-epoch", 2, "--keep-interval-updates", -1)
    whole = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "checkpoint_2_6.pt"))["model"]
    for name in ("checkpoint_2_6.pt", "checkpoint_last.pt"):
        (tmp_path / name).unlink()
    train(*flags, "--max-epoch", 2, "--restore-file", tmp_path / "checkpoint_1_3.pt")
    resumed = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "checkpoint_2_6.pt"))["model"]
    assert all(resumed[name].equal(value) for name, value in whole.items())


@pytest.mark.parametrize(
    ("values", "kept", "flags"),
    [
        ([2, 3, 4], [2, 3, 4], []),
        ([4, 2, 5, 3, 1], [1, 2, 3], []),
        ([-1, -4, -2, -3], [-4, -3, -2], []),
        ([2, 4, 1, 3], [2, 3, 4], ["--maximize-best-checkpoint-metric"]),
        ([-3, -1, -4, -2], [-3, -2, -1], ["--maximize-best-checkpoint-metric"]),
    ],
    ids=str,
)
def test_best_checkpoints_are_kept(train, monkeypatch, values, kept, flags):
    validations = iter(values)
    monkeypatch.setattr(fairseq_cli.train, "validate", lambda *_: [float(next(validations))])
    flags = [*flags, "--keep-best-checkpoints", 3, "--no-epoch-checkpoints", "--no-last-checkpoints"]
    names = train("--max-epoch", len(values), *flags)
    found = [name for name in names if name.startswith("checkpoint.best_loss_")]
    assert sorted(round(float(name[len("checkpoint.best_loss_") : -3])) for name in found) == kept
