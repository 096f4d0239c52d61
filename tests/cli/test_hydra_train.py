"""fairseq-lowrank hydra-train: fairseq-hydra-train with our plugin, under the argparse of Python 3.14 too."""

import argparse
import subprocess
import sys

import pytest

pytest.importorskip("fairseq")

from hydra.core.global_hydra import GlobalHydra

from fairseq_lowrank import cli
from fairseq_lowrank.cli import hydra_train, user_dir


@pytest.fixture
def python_3_14(monkeypatch):
    """Let ``add_argument`` check the help text as Python 3.14 does."""
    add_argument = argparse._ActionsContainer.add_argument

    def checked(self, *names, **options):
        action = add_argument(self, *names, **options)
        if action.help and action.help is not argparse.SUPPRESS and hasattr(self, "_get_formatter"):
            try:
                if "%" in action.help:
                    self._get_formatter()._expand_help(action)
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError("badly formed help string") from error
        return action

    monkeypatch.setattr(argparse._ActionsContainer, "add_argument", checked)


@pytest.fixture
def hydra_command(monkeypatch, tmp_path, capfd):
    """Run ``fairseq-lowrank hydra-train WORDS`` in a folder; return its exit status and its output."""

    def run(*words):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["fairseq-lowrank"])
        GlobalHydra.instance().clear()
        try:
            status = cli.main(["hydra-train", *map(str, words)])
        except SystemExit as end:
            status = end.code or 0
        finally:
            GlobalHydra.instance().clear()
        assert sys.argv == ["fairseq-lowrank"]
        return status, "".join(capfd.readouterr())

    return run


@pytest.mark.parametrize(
    "words",
    [
        ["--", "--cfg", "job", "task=translation"],
        ["task=translation", "--cfg", "job"],
        ["--", "--cfg", "job"],
        ["--", "--cfg=job", "task=translation", "common.seed=2", "--resolve"],
    ],
)
def test_hydra_train_prints_its_configuration(hydra_command, python_3_14, words):
    status, output = hydra_command(*words)
    assert status == 0
    assert f"user_dir: {user_dir.folder()}" in output


def test_hydra_train_prints_hydras_help(hydra_command, python_3_14):
    status, output = hydra_command("--", "--hydra-help")
    assert status == 0
    assert "--shell-completion" in output and "Install or Uninstall shell completion" in output


@pytest.mark.usefixtures("quick_starts")
def test_hydra_train_trains_with_our_attention(translation_data, tmp_path):
    model = {"encoder_layers": 1, "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 16, "decoder_layers": 1}
    words = [
        *("common.cpu=true", "dataset.num_workers=0", "dataset.max_tokens=500", "dataset.disable_validation=true"),
        *("task=translation", f"task.data={translation_data}", "task.source_lang=de", "task.target_lang=en"),
        *("+model._name=transformer_iwslt_de_en", "+model.attention=mixhead-b"),
        *(f"+model.{name}={size}" for name, size in model.items()),
        *("criterion=cross_entropy", "optimizer=adam", "lr_scheduler=fixed", "optimization.lr=[0.01]"),
        *("optimization.max_update=1", f"checkpoint.save_dir={tmp_path / 'checkpoints'}"),
    ]
    command = [sys.executable, "-m", "fairseq_lowrank.cli", "hydra-train", *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "mixing='positionwise'" in ended.stdout and "done training" in ended.stdout


def test_hydra_train_leaves_argparse_unchanged(hydra_command):
    add_argument = argparse.ArgumentParser.add_argument
    hydra_command("--", "--cfg", "job")
    assert argparse.ArgumentParser.add_argument is add_argument


@pytest.mark.parametrize("given", ["common.user_dir=mine", "+common.user_dir=mine"])
def test_hydra_train_keeps_a_given_user_dir(given):
    assert hydra_train.with_user_dir(["--", "-m", given]) == ["-m", given]


def test_hydra_train_checks_a_configuration_like_a_command_line(hydra_command, translation_data, tmp_path):
    run = ["common.cpu=true", "task=translation", "criterion=cross_entropy", "dataset.max_tokens=500"]
    words = ["+model._name=transformer", f"task.data={translation_data}", "checkpoint.save_dir=checkpoints"]
    status, output = hydra_command(*run, *words, "checkpoint.restore_file=nothing.pt")
    assert status == 2 and "--restore-file nothing.pt: no such file" in output.splitlines()[-1]
    assert not list(tmp_path.rglob("checkpoints"))
