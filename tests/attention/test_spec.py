"""Axes, presets and what is refused."""

import pytest

from fairseq_lowrank.attention import AXES, PRESETS, AttentionSpec, build_attention


def test_the_axes_and_their_values():
    assert set(AXES["projection"]) == {
        "independent",
        "single",
        "multi-query",
        "shared-kv",
        "el",
        "head-embedding-add",
        "head-embedding-mul",
    }
    assert tuple(AXES["activation"]) == ("softmax", "sigsoftmax")
    assert tuple(AXES["mixing"]) == ("none", "static", "positionwise", "random", "average", "diagonal")


@pytest.mark.parametrize(
    ("preset", "expected"),
    {
        "mha": AttentionSpec(),
        "fixedhead": AttentionSpec(head_dim=9),
        "mixhead-a": AttentionSpec(mixing="static"),
        "mixhead-b": AttentionSpec(mixing="positionwise"),
        "mixhead-random": AttentionSpec(mixing="random"),
        "avghead": AttentionSpec(mixing="average"),
        "gain": AttentionSpec(mixing="diagonal"),
        "mhe-add": AttentionSpec(projection="head-embedding-add"),
        "mhe-mul": AttentionSpec(projection="head-embedding-mul"),
        "sha": AttentionSpec(projection="single"),
        "mqa": AttentionSpec(projection="multi-query"),
        "skv": AttentionSpec(projection="shared-kv"),
        "el": AttentionSpec(projection="el"),
    }.items(),
)
def test_a_preset_sets_axes(preset, expected):
    axes = {"head_dim": 9} if preset == "fixedhead" else {}
    assert AttentionSpec.from_preset(preset, **axes) == expected


def test_there_is_no_preset_beyond_those_tested():
    assert len(PRESETS) == 13


def test_an_axis_beside_a_preset_wins_and_none_leaves_it():
    chosen = AttentionSpec.from_preset(
        "mixhead-b", mixing="static", activation="sigsoftmax", head_dim=7, projection=None
    )
    assert chosen == AttentionSpec(head_dim=7, activation="sigsoftmax", mixing="static")
    assert AttentionSpec.from_preset("mixhead-b", mixing=None).mixing == "positionwise"


@pytest.mark.parametrize(
    ("preset", "options", "message"),
    [
        ("mixhead", {}, "attention preset 'mixhead': expected one of mha, fixedhead, mixhead-a"),
        (
            "mha",
            {"score": "cosine"},
            "unknown attention axis score: expected head_dim, value_dim, projection, activation, mixing",
        ),
        ("mha", {"projection": "lowrank"}, "projection='lowrank': expected one of .*multi-query"),
        ("mha", {"activation": "relu"}, "activation='relu': expected one of softmax, sigsoftmax"),
        ("mha", {"mixing": "dense"}, "mixing='dense': expected one of none, static, positionwise, random, average"),
        ("mha", {"head_dim": 0}, "head_dim=0: expected a positive integer"),
        (
            "fixedhead",
            {},
            r"'fixedhead' needs a head size \(--head-dim N.*\): the paper sets it to the sequence length",
        ),
        ("mha", {"num_heads": 5}, "embed_dim=12 is not divisible by num_heads=5: .*give a head size"),
        ("mha", {"num_heads": 0}, "num_heads=0: expected a positive integer"),
        ("el", {"head_dim": 5}, "'el' cuts the hidden states into heads and needs .* = 4: head_dim=5"),
        ("el", {"kdim": 8, "vdim": 8}, "'el' uses the hidden states as keys and needs kdim = embed_dim: kdim=8"),
        ("el", {"vdim": 8}, "'el' uses the keys as values and needs vdim = kdim: vdim=8, kdim=12"),
        ("skv", {"kdim": 8}, "'shared-kv' uses the keys as values and needs vdim = kdim: vdim=12, kdim=8"),
        ("mha", {"backend": "flash"}, "backend='flash': expected one of auto, reference, sdpa"),
        ("mixhead-b", {"backend": "sdpa"}, "backend='sdpa' cannot compute head mixing; use backend='auto'"),
        ("mha", {"backend": "sdpa", "activation": "sigsoftmax"}, "'sdpa' cannot compute the activation sigsoftmax"),
        ("mha", {"dropout": 1.0}, "dropout=1.0: expected a number with 0 <= dropout < 1"),
    ],
)
def test_bad_choices_are_refused(preset, options, message):
    with pytest.raises(ValueError, match=message):
        build_attention(preset, **{"embed_dim": 12, "num_heads": 3} | options)


def test_a_head_size_frees_the_number_of_heads():
    assert build_attention("mha", 12, 5, head_dim=4).out_proj.weight.shape == (12, 20)
