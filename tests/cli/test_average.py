"""fairseq-lowrank average: the mean of checkpoints of one model, and nothing else."""

import argparse

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils

from fairseq_lowrank.cli import main
from fairseq_lowrank.progress import Progress
from fairseq_lowrank.repairs.loading import load_checkpoint


def save(path, value=0.0, dtype=torch.float32, steps=3, name="w", seed=1, **model):
    """A checkpoint of a model with one float and one integer parameter."""
    torch.save(
        {
            "args": None,
            "cfg": {"common": {"seed": seed}, "model": argparse.Namespace(arch="transformer", seed=seed, **model)},
            "model": {name: torch.tensor([value, 2 * value], dtype=dtype), "steps": torch.tensor(steps)},
            "optimizer_history": [{"optimizer_name": "Adam", "lr_scheduler_state": {}, "num_updates": 1}],
            "extra_state": {"train_iterator": {"epoch": 1}},
            "last_optimizer_state": {"state": {}},
        },
        path,
    )
    return str(path)


def average(tmp_path, *paths):
    output = tmp_path / "average.pt"
    return main(["average", *paths, "--output", str(output)]), output


def test_parameters_are_the_mean_and_trainings_may_differ_in_their_seed(tmp_path, monkeypatch):
    paths = [save(tmp_path / f"{value}.pt", value, seed=value) for value in (1, 2, 6)]
    counts = []
    monkeypatch.setattr(Progress, "update", lambda step: counts.append((step.label, step.total)))
    status, output = average(tmp_path, *paths)
    state = checkpoint_utils.load_checkpoint_to_cpu(output)
    assert status == 0
    assert counts == [("averaging", 3)] * 3
    assert state["model"]["w"].tolist() == [3.0, 6.0]
    assert state["model"]["steps"] == 3
    assert state["cfg"].model.arch == "transformer"
    assert "last_optimizer_state" not in state


def test_a_setting_that_refers_to_another_still_does(tmp_path):
    save(tmp_path / "a.pt")
    state = load_checkpoint(tmp_path / "a.pt")
    state["cfg"] |= {"task": {"seed": "${common.seed}"}}
    torch.save(state, tmp_path / "a.pt")
    _, output = average(tmp_path, str(tmp_path / "a.pt"))
    assert load_checkpoint(output)["cfg"]["task"]["seed"] == "${common.seed}"


def test_tied_parameters_are_averaged_once_for_each_name(tmp_path):
    paths = []
    for value in (1.0, 3.0):
        paths.append(save(tmp_path / f"{value}.pt", value))
        state = load_checkpoint(paths[-1])
        state["model"]["tied"] = state["model"]["w"]
        torch.save(state, paths[-1])
    tied = load_checkpoint(paths[0])["model"]
    assert tied["tied"].data_ptr() == tied["w"].data_ptr()
    _, output = average(tmp_path, *paths)
    found = load_checkpoint(output)["model"]
    assert found["w"].tolist() == found["tied"].tolist() == [2.0, 4.0]


def with_moving_average(path, value):
    path = save(path, value)
    state = load_checkpoint(path)
    moving = {"w": torch.tensor([10 * value, 0.0], dtype=torch.float16), "steps": torch.tensor(3)}
    state["extra_state"] |= {"ema": moving, "ema_fp32_params": {"w": torch.tensor([10 * value, 0.0])}}
    torch.save(state, path)
    return path


def test_moving_averages_are_averaged_where_every_checkpoint_has_them(tmp_path):
    paths = [with_moving_average(tmp_path / f"{value}.pt", value) for value in (1.0, 4.0)]
    _, output = average(tmp_path, *paths)
    state = load_checkpoint(output)
    extra = state["extra_state"]
    assert state["model"]["w"].tolist() == [2.5, 5.0]
    assert extra["ema"]["w"].tolist() == extra["ema_fp32_params"]["w"].tolist() == [25.0, 0.0]
    assert extra["ema"]["w"].dtype == torch.float16
    output.unlink()
    _, output = average(tmp_path, *paths, save(tmp_path / "none.pt", 7.0))
    state = load_checkpoint(output)
    assert state["model"]["w"].tolist() == [4.0, 8.0]
    assert state["extra_state"].keys() == {"train_iterator"}


def test_a_checkpoint_given_twice_counts_twice(tmp_path):
    one, four = save(tmp_path / "1.pt", 1.0), save(tmp_path / "4.pt", 4.0)
    _, output = average(tmp_path, one, one, four)
    assert checkpoint_utils.load_checkpoint_to_cpu(output)["model"]["w"].tolist() == [2.0, 4.0]


def test_half_precision_is_summed_in_float32_and_stays_half_precision(tmp_path):
    # 60000 + 60000 overflows float16
    paths = [save(tmp_path / f"{i}.pt", 30000.0, torch.float16) for i in range(3)]
    _, output = average(tmp_path, *paths)
    weight = checkpoint_utils.load_checkpoint_to_cpu(output)["model"]["w"]
    assert weight.dtype == torch.float16
    assert weight.tolist() == [30000.0, 60000.0]


@pytest.mark.parametrize(
    ("different", "message"),
    [
        ({"attention": "mixhead-a"}, "attention is missing in the first and mixhead-a in the second"),
        ({"name": "v"}, "w is torch.float32 [2] in the first and missing in the second"),
        ({"dtype": torch.float16}, "w is torch.float32 [2] in the first and torch.float16 [2] in the second"),
        ({"steps": 4}, "differ in steps, whose integers have no mean"),
    ],
)
def test_checkpoints_of_different_models_are_refused_and_nothing_is_written(tmp_path, capsys, different, message):
    status, output = average(tmp_path, save(tmp_path / "a.pt"), save(tmp_path / "b.pt", **different))
    assert status == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt"]
    assert not output.exists()


def test_a_missing_checkpoint_or_folder_is_one_line(tmp_path, capsys):
    assert average(tmp_path, str(tmp_path / "none.pt"))[0] == 2
    assert "none.pt is not a checkpoint file" in capsys.readouterr().err.splitlines()[-1]
    assert main(["average", save(tmp_path / "a.pt"), "--output", str(tmp_path / "nowhere" / "a.pt")]) == 2
    assert "--output" in capsys.readouterr().err.splitlines()[-1]
