"""Methods that do not combine freely, in fairseq's commands: two updates and a search in tiny models, and refusals in one line."""

import re

import pytest

pytest.importorskip("fairseq")

from needed_axes import PRESETS as FREE_PRESETS
from tiny_transformer import SIZES, preset_flags

from fairseq_lowrank.attention import PRESETS

# the others are in tests/models/test_transformer.py
LATER_METHODS = [preset for preset in PRESETS if preset not in FREE_PRESETS]
TRAIN = [
    *("--optimizer", "adam", "--lr", 0.01, "--max-tokens", 256, "--max-update", 2, "--num-workers", 0, "--cpu"),
    *("--no-progress-bar", "--no-epoch-checkpoints", "--disable-validation"),
]
SEARCH = ["--beam", 2, "--max-len-b", 6, "--max-tokens", 300, "--num-workers", 0, "--cpu"]
TEXT = ["--task", "language_modeling", "--arch", "transformer_lm", *SIZES[6:12], "--decoder-attention-heads", 4]
TEXT += ["--decoder-input-dim", 16, "--decoder-output-dim", 16, "--tokens-per-sample", 12]


def hypotheses(log):
    return re.findall(r"^H-\d+\t", log, flags=re.MULTILINE)


@pytest.mark.parametrize("preset", LATER_METHODS)
def test_a_later_method_trains_and_translates(preset, translation_data, tmp_path, fairseq_command):
    flags = ["--arch", "transformer", *SIZES, *preset_flags(preset), "--save-dir", tmp_path]
    assert "num_updates: 2" in fairseq_command("train", translation_data, *TRAIN, *flags)
    path = tmp_path / "checkpoint_last.pt"
    assert len(hypotheses(fairseq_command("generate", translation_data, "--path", path, *SEARCH))) == 12


@pytest.mark.parametrize(
    "preset", [*LATER_METHODS[::2], *(pytest.param(one, marks=pytest.mark.grid) for one in LATER_METHODS[1::2])]
)
def test_a_later_method_trains_and_continues_text(preset, language_model_data, tmp_path, fairseq_command):
    flags = [*TEXT, *preset_flags(preset, ("decoder",)), "--save-dir", tmp_path]
    assert "num_updates: 2" in fairseq_command("train", language_model_data, *TRAIN, *flags)
    generate = ["--task", "language_modeling", "--path", tmp_path / "checkpoint_last.pt", "--sample-break-mode", "eos"]
    log = fairseq_command("generate", language_model_data, *generate, "--prefix-size", 2, *SEARCH)
    assert len(hypotheses(log)) == 12


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--attention xsa", "--attention-sites encoder,decoder"),
        ("--attention dcmha --mixing-orthogonality 0.1", "--mixing-orthogonality 0.1"),
        ("--attention gated --mixing-orthogonality 0.1", "--mixing-orthogonality 0.1"),
        ("--attention mla --mixing-lr-scale 2", "--mixing-lr-scale 2"),
        ("--attention mea --latent-dim 4", "latent_dim=4"),
        ("--attention mla --gate-start half", "gate_start='half'"),
        ("--attention tpa --head-output difference", "'tensor-product'"),
        ("--attention diff --head-mixing static", "'difference'"),
        (
            "--attention diff --load-alignments --criterion label_smoothed_cross_entropy_with_alignment",
            "--head-output difference",
        ),
    ],
)
def test_flags_without_a_meaning_are_refused(flags, named, translation_data, tmp_path, refusal):
    words = ["--arch", "transformer", *SIZES, *flags.split(), "--save-dir", tmp_path]
    assert named in refusal("train", translation_data, *TRAIN, *words)


@pytest.mark.parametrize(
    "attention, parts",
    [
        ("dcmha", ["score_mixing", "mixing"]),
        ("score-gain", ["score_mixing"]),
        ("headmix", ["head_map"]),
        ("mea", ["head_map"]),
        ("knocking-linear", ["head_map"]),
        ("gain", ["mixing"]),
        ("gated", ["head_output"]),
    ],
)
def test_the_rate_of_every_part_is_scaled_without_decay(attention, parts):
    from tiny_transformer import build

    model = build("transformer", *SIZES, "--attention", attention, "--mixing-lr-scale", 3)
    layer = model.encoder.layers[0].self_attn
    overrides = {name: getattr(parameter, "optim_overrides", {}) for name, parameter in layer.named_parameters()}
    found = {name: own["optimizer"] for name, own in overrides.items() if name.partition(".")[0] in parts}
    assert found and all(own == {"weight_decay": 0.0, "lr_scale": 3.0} for own in found.values())
    assert not any("lr_scale" in str(own) for name, own in overrides.items() if name not in found)


def test_head_maps_at_the_common_rate_stay_in_the_optimizer_groups_of_earlier_checkpoints():
    from tiny_transformer import build

    for flags, parts in (
        (["--attention", "headmix", "--head-output", "head-gate"], ("head_map", "head_output")),
        (["--attention", "mixhead-a", "--head-map", "heads"], ("head_map",)),
    ):
        layer = build("transformer", *SIZES, *flags).encoder.layers[0].self_attn
        for part in parts:
            for parameter in getattr(layer, part).parameters():
                assert parameter.optim_overrides["optimizer"] == {"weight_decay": 0.0}


def test_transformer_xl_refuses_methods_that_need_dot_products(language_model_data, tmp_path, refusal):
    flags = [
        "--task",
        "segment_lm",
        "--arch",
        "lowrank_transformer_xl",
        "--tokens-per-sample",
        12,
        "--save-dir",
        tmp_path,
    ]
    for preset in ("mla", "collaborative", "lrkv", "tpa", "diff", "knocking-linear", "mea"):
        assert "'relative'" in refusal("train", language_model_data, *TRAIN, *flags, "--attention", preset)
