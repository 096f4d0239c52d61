"""A stock model trains, validates and picks its best checkpoint under --user-dir exactly as without it."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

pytest.importorskip("fairseq")

PACKAGE = Path(__file__).resolve().parents[2] / "fairseq_lowrank"
TRAIN = [
    *("--arch", "transformer", "--encoder-layers", "1", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16"),
    *("--encoder-attention-heads", "2", "--decoder-layers", "1", "--decoder-embed-dim", "16"),
    *("--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "2", "--optimizer", "adam", "--lr", "0.05"),
    *("--max-tokens", "300", "--max-epoch", "4", "--cpu", "--num-workers", "0", "--log-format", "json"),
    *("--log-interval", "1", "--no-epoch-checkpoints", "--no-last-checkpoints"),
]
OF_THE_CLOCK = ("wps", "ups", "train_wps", "train_ups", "valid_wps", "wall", "train_wall", "train_train_wall")


def train(data: Path, save_dir: Path, *flags: str) -> tuple[list[dict], dict]:
    """Return the log and the parameters of the best checkpoint of a training in a process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOWRANK_")}
    done = subprocess.run(
        [Path(sys.executable).with_name("fairseq-train"), data, *TRAIN, "--save-dir", save_dir, *flags],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.rpartition(" | ")[2] for line in (done.stdout + done.stderr).splitlines()]
    log = [json.loads(line) for line in lines if line.startswith('{"epoch"')]
    with torch.serialization.safe_globals([Namespace]):
        state = torch.load(save_dir / "checkpoint_best.pt", weights_only=True)
    log.append({"best": state["extra_state"]["best"], "epoch": state["extra_state"]["train_iterator"]["epoch"]})
    return [{name: value for name, value in entry.items() if name not in OF_THE_CLOCK} for entry in log], state["model"]


@pytest.mark.usefixtures("quick_starts")
def test_stock_training_is_the_same_with_and_without_the_plugin(translation_data, tmp_path):
    log, model = train(translation_data, tmp_path / "alone")
    other_log, other_model = train(translation_data, tmp_path / "plugin", "--user-dir", str(PACKAGE))
    assert len(log) > 8 and any("valid_loss" in entry for entry in log)
    assert other_log == log
    assert other_model.keys() == model.keys()
    assert all(torch.equal(other_model[name], tensor) for name, tensor in model.items())
