"""Every way to give the plugin to fairseq's commands, each run as a user runs it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

REPOSITORY = Path(__file__).resolve().parent.parent
TINY_DECODER = [
    *("--decoder-layers", "1", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16"),
    *("--decoder-attention-heads", "2", "--attention", "mixhead-b"),
    *("--optimizer", "adam", "--max-tokens", "500", "--max-update", "2", "--cpu", "--num-workers", "0"),
]
TINY_TRANSFORMER = [
    *("--arch", "lowrank_transformer", "--encoder-layers", "1", "--encoder-embed-dim", "16"),
    *("--encoder-ffn-embed-dim", "16", "--encoder-attention-heads", "2", *TINY_DECODER),
]
QUICKLY = ["--beam", "2", "--max-len-b", "5"]
TINY_LANGUAGE_MODEL = [
    *("--task", "language_modeling", "--arch", "lowrank_transformer_lm", "--tokens-per-sample", "16", *TINY_DECODER),
]


def run(name, *args, folder, path=None, **kwargs):
    """Run an installed command in a folder and return what it printed; PYTHONPATH leads to the plugin, if given."""
    result = subprocess.run(
        [Path(sys.executable).with_name(name), *args],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(path or "")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **kwargs,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.mark.usefixtures("quick_starts")
def test_a_clone_serves_the_validation_of_translations(translation_data, trained):
    """Training, translating and scoring from a clone are in test_translation_commands.py."""
    model = [translation_data, "--user-dir", "fairseq_lowrank", "--path", trained("mixhead-a"), "--cpu"]
    validated = run("fairseq-validate", *model, "--max-tokens", "500", "--task", "translation", folder=REPOSITORY)
    assert "valid on 'valid' subset | loss" in validated


@pytest.mark.usefixtures("quick_starts")
def test_a_clone_serves_the_language_model_commands(language_model_data, tmp_path):
    plugin = ["--user-dir", "fairseq_lowrank"]
    run("fairseq-train", language_model_data, *plugin, *TINY_LANGUAGE_MODEL, "--save-dir", tmp_path, folder=REPOSITORY)
    model = [language_model_data, *plugin, "--path", tmp_path / "checkpoint_last.pt", "--cpu"]
    assert "Perplexity:" in run("fairseq-eval-lm", *model, "--tokens-per-sample", "16", folder=REPOSITORY)


def test_an_installed_package_serves_from_any_folder(translation_data, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("fairseq_lowrank", "setup.py", "pyproject.toml", "LICENSE"):
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy
        copy(REPOSITORY / name, source / name)
    installed = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", installed, source], check=True)

    where = {"folder": tmp_path, "path": installed}
    printed = run("fairseq-lowrank", "user-dir", **where).strip().splitlines()[-1]
    assert printed == str(installed / "fairseq_lowrank")
    plugin = ["--user-dir", printed]
    run("fairseq-train", translation_data, *plugin, *TINY_TRANSFORMER, "--save-dir", "checkpoints", **where)
    model = ["--path", "checkpoints/checkpoint_last.pt", "--cpu", "--max-tokens", "500"]
    assert run("fairseq-generate", translation_data, *plugin, *model, *QUICKLY, **where).count("\nH-") == 12


@pytest.mark.usefixtures("quick_starts")
def test_another_plugin_may_import_this_one(translation_data, tmp_path):
    (tmp_path / "my_plugin").mkdir()
    (tmp_path / "my_plugin" / "__init__.py").write_text(
        "import fairseq_lowrank\n"
        "from fairseq.models import register_model_architecture\n"
        "@register_model_architecture('lowrank_transformer', 'my_transformer')\n"
        "def my_transformer(args):\n"
        "    from fairseq.models import ARCH_CONFIG_REGISTRY\n"
        "    args.attention = 'mhe-mul'\n"
        "    ARCH_CONFIG_REGISTRY['lowrank_transformer_iwslt_de_en'](args)\n"
    )
    train = [*TINY_TRANSFORMER, "--arch", "my_transformer", "--user-dir", "my_plugin", "--save-dir", "checkpoints"]
    output = run("fairseq-train", translation_data, *train, folder=tmp_path, path=REPOSITORY)
    assert "projection='head-embedding-mul'" in output
    assert "done training" in output


@pytest.mark.usefixtures("quick_starts")
def test_hydra_trains_fairseqs_own_language_model_with_a_flag_of_ours(language_model_data, tmp_path):
    model = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_embed_dim": 16}
    model |= {f"decoder_{size}_dim": 16 for size in ("embed", "input", "output")}
    output = run(
        "fairseq-hydra-train",
        *(f"common.user_dir={REPOSITORY / 'fairseq_lowrank'}", "common.cpu=true", "dataset.num_workers=0"),
        *("task=language_modeling", f"task.data={language_model_data}", "task.tokens_per_sample=16"),
        *(
            "model=transformer_lm",
            "+model.attention=mixhead-b",
            *(f"model.{key}={size}" for key, size in model.items()),
        ),
        *("criterion=cross_entropy", "optimizer=adam", "lr_scheduler=fixed", "dataset.max_tokens=500"),
        *("optimization.max_update=1", "optimization.lr=[0.01]", f"checkpoint.save_dir={tmp_path / 'checkpoints'}"),
        folder=tmp_path,
    )
    assert "mixing='positionwise'" in output and "done training" in output


@pytest.mark.usefixtures("quick_starts")
def test_hydra_trains_a_model_named_on_its_command_line(translation_data, tmp_path, fairseq_command):
    output = run(
        "fairseq-hydra-train",
        *(f"common.user_dir={REPOSITORY / 'fairseq_lowrank'}", "common.cpu=true", "dataset.num_workers=0"),
        *("task=translation", f"task.data={translation_data}", "task.source_lang=de", "task.target_lang=en"),
        *("+model._name=transformer_iwslt_de_en", "+model.attention=mixhead-b", "+model.encoder_layers=1"),
        *("+model.encoder_embed_dim=16", "+model.encoder_ffn_embed_dim=16", "+model.decoder_layers=1"),
        *("criterion=cross_entropy", "optimizer=adam", "lr_scheduler=fixed", "dataset.max_tokens=500"),
        *("optimization.max_update=2", "optimization.lr=[0.01]", f"checkpoint.save_dir={tmp_path / 'checkpoints'}"),
        folder=tmp_path,
    )
    assert "mixing='positionwise'" in output
    assert "done training" in output
    model = ["--path", tmp_path / "checkpoints" / "checkpoint_last.pt", "--cpu", "--max-tokens", "500"]
    assert fairseq_command("generate", translation_data, *model, *QUICKLY).count("\nH-") == 12
