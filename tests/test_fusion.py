"""A language model of ours helps a translation model of ours in beam search (fairseq-generate --lm-path)."""

import shutil

import pytest

pytest.importorskip("fairseq")

TRAIN = [
    *(
        "--attention",
        "mixhead-b",
        "--decoder-layers",
        "1",
        "--decoder-embed-dim",
        "16",
        "--decoder-ffn-embed-dim",
        "16",
    ),
    *("--decoder-attention-heads", "2", "--optimizer", "adam", "--lr", "0.01", "--max-tokens", "500", "--cpu"),
    *("--max-update", "4", "--num-workers", "0", "--no-progress-bar", "--no-epoch-checkpoints"),
]
TRANSLATION = [
    *("--arch", "lowrank_transformer", "--encoder-layers", "1", "--encoder-embed-dim", "16"),
    *("--encoder-ffn-embed-dim", "16", "--encoder-attention-heads", "2"),
]
LANGUAGE_MODEL = ["--task", "language_modeling", "--arch", "lowrank_transformer_lm", "--tokens-per-sample", "16"]


def scores(output):
    return [float(line.split("\t")[1]) for line in output.splitlines() if line.startswith("H-")]


def test_a_language_model_takes_part_in_beam_search(fairseq_command, translation_data, tmp_path):
    data = shutil.copytree(translation_data, tmp_path / "data-bin")
    shutil.copy(data / "dict.en.txt", data / "dict.txt")  # fairseq looks for the language model's dictionary there
    text = [f"--{split}pref={translation_data.parent / split}.en" for split in ("train", "valid")]
    fairseq_command(
        "preprocess", "--only-source", "--srcdict", data / "dict.en.txt", *text, "--destdir", tmp_path / "text"
    )
    fairseq_command("train", tmp_path / "text", *LANGUAGE_MODEL, *TRAIN, "--save-dir", tmp_path / "lm")
    fairseq_command("train", data, *TRANSLATION, *TRAIN, "--save-dir", tmp_path / "translation")

    model = [data, "--path", tmp_path / "translation/checkpoint_last.pt", "--cpu", "--max-len-b", "5", "--beam", "2"]
    alone = fairseq_command("generate", *model)
    fused = fairseq_command("generate", *model, "--lm-path", tmp_path / "lm/checkpoint_last.pt", "--lm-weight", "0.5")
    assert len(scores(fused)) == 12
    assert scores(fused) != scores(alone)
