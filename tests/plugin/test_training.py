"""``--train-only`` leaves every other tensor as it is, bit for bit, and a scaled learning rate of 0 is refused."""

import subprocess
import sys

import pytest

pytest.importorskip("fairseq")

import torch
from fairseq import checkpoint_utils
from torch import nn

from fairseq_lowrank.attention import build_attention, train_only
from fairseq_lowrank.messages import UserError

SIZES = [
    "--encoder-layers",
    2,
    "--encoder-embed-dim",
    16,
    "--encoder-ffn-embed-dim",
    16,
    "--encoder-attention-heads",
    4,
]
SIZES += [flag.replace("encoder", "decoder") if isinstance(flag, str) else flag for flag in SIZES]
TRAINING = ["--optimizer", "adam", "--lr", 0.05, "--weight-decay", 0.1, "--clip-norm", 1, "--max-tokens", 256, "--cpu"]
TRAINING += ["--num-workers", 0, "--no-epoch-checkpoints", "--disable-validation", "--no-progress-bar"]
MIXHEAD = ["--arch", "lowrank_transformer_iwslt_de_en", "--attention", "mixhead-a", *SIZES, *TRAINING]


def tensors(path):
    return checkpoint_utils.load_checkpoint_to_cpu(str(path))["model"]


def changed(before, path):
    """Return the names of tensors whose bits differ. Mixing that the first state lacks is compared with the identity."""
    after = tensors(path)
    return {name for name, tensor in after.items() if not tensor.equal(before.get(name, torch.eye(4)))}


@pytest.mark.parametrize(
    ("which", "chosen"),
    [
        ("mixing", lambda name: ".mixing." in name),
        ("encoder", lambda name: name.startswith("encoder.") and name != "encoder.version"),
        ("*.layers.1.fc?.weight", lambda name: ".layers.1.fc" in name and name.endswith("weight")),
    ],
)
def test_training_leaves_all_other_tensors(which, chosen, trained, translation_data, fairseq_command, tmp_path):
    start = trained("stock")
    flags = ["--finetune-from-model", start, "--train-only", which, "--save-dir", tmp_path]
    said = fairseq_command("train", translation_data, *MIXHEAD, *flags, "--max-update", 2)
    assert f"--train-only {which}: " in said
    path, before = tmp_path / "checkpoint_last.pt", tensors(start)
    assert changed(before, path) == {name for name in tensors(path) if chosen(name)}
    assert checkpoint_utils.load_checkpoint_to_cpu(str(path))["cfg"]["model"].train_only == which
    fairseq_command("train", translation_data, *MIXHEAD, *flags, "--max-update", 4)  # resumes
    assert changed(before, path) == {name for name in tensors(path) if chosen(name)}
    again = tmp_path / "again"
    fairseq_command("train", translation_data, *MIXHEAD, *flags[:4], "--save-dir", again, "--max-update", 4)
    assert all(tensor.equal(tensors(again / "checkpoint_last.pt")[name]) for name, tensor in tensors(path).items())


def test_resuming_needs_the_same_choice(trained, translation_data, fairseq_command, refusal, tmp_path):
    flags = ["--finetune-from-model", trained("stock"), "--save-dir", tmp_path]
    fairseq_command("train", translation_data, *MIXHEAD, *flags, "--train-only", "mixing", "--max-update", 1)
    line = refusal("train", translation_data, *MIXHEAD, *flags, "--max-update", 2)
    assert "--reset-optimizer" in line


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("backend", ["legacy_ddp", "pytorch_ddp"])
def test_two_workers_leave_all_other_tensors(backend, trained, translation_data, tmp_path):
    start = trained("stock")
    flags = ["--finetune-from-model", start, "--train-only", "mixing", "--save-dir", tmp_path, "--max-update", 2]
    train = ["fairseq-train", translation_data, *MIXHEAD, *flags, "--ddp-backend", backend]
    words = [sys.executable, "-m", "fairseq_lowrank.cli", "launch", "--workers", 2, "--", *train]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "checkpoint_last.pt"
    assert changed(tensors(start), path) == {name for name in tensors(path) if ".mixing." in name}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lr", 0, "--mixing-lr-scale", 10], "Use --train-only mixing"),
        (["--train-only", "nope"], "train only 'nope': the model has no such parameter"),
        (["--train-only", "mixing", "--quant-noise-pq", 0.1], "--quant-noise-pq changes frozen weights too"),
    ],
    ids=str,
)
def test_training_of_nothing_is_refused(flags, words, translation_data, refusal, tmp_path):
    assert words in refusal("train", translation_data, *MIXHEAD, *flags, "--save-dir", tmp_path)


def test_train_only_names_what_trains():
    layers = nn.ModuleDict({"encoder": build_attention("mixhead-b", embed_dim=8, num_heads=2), "head": nn.Linear(8, 8)})
    mixing = ["encoder.mixing.weight", "encoder.mixing.query_weight"]
    assert train_only(layers, "mixing") == [name for name, tensor in layers.named_parameters() if tensor.requires_grad]
    assert sorted(train_only(layers, "mixing")) == sorted(mixing)
    assert train_only(layers, "head.*") == ["head.weight", "head.bias"]
    layers["encoder"].out_proj.weight = layers["head"].weight  # chosen by one of its names alone
    assert train_only(layers, "head.*") == ["head.bias"]
    with pytest.raises(UserError, match="mixing, encoder, decoder or a pattern"):
        train_only(nn.Linear(2, 2), "mixing")
