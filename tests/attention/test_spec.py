"""Axes, presets and what is refused."""

import inspect
import pydoc
import textwrap

import pytest
import torch

from fairseq_lowrank import attention, ops
from fairseq_lowrank.attention import AttentionSpec, build_attention


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
        "talking-heads": AttentionSpec(score_mixing="static", mixing="static"),
        "mhe-add": AttentionSpec(projection="head-embedding-add"),
        "mhe-mul": AttentionSpec(projection="head-embedding-mul"),
        "sha": AttentionSpec(projection="single"),
        "mqa": AttentionSpec(projection="multi-query"),
        "gqa": AttentionSpec(key_value_heads=2),
        "skv": AttentionSpec(projection="shared-kv"),
        "el": AttentionSpec(projection="el"),
        "gated-head": AttentionSpec(head_output="head-gate"),
        "gated": AttentionSpec(head_output="gate"),
        "mla": AttentionSpec(projection="latent"),
        "dcmha": AttentionSpec(score_mixing="dynamic", mixing="dynamic"),
        "diff": AttentionSpec(head_output="difference"),
        "collaborative": AttentionSpec(projection="collaborative"),
        "mfa": AttentionSpec(projection="factorized-query"),
        "lrkv": AttentionSpec(projection="low-rank-kv"),
        "tpa": AttentionSpec(projection="tensor-product"),
        "xsa": AttentionSpec(head_output="exclusive"),
        "knocking-linear": AttentionSpec(head_map="features"),
        "mea": AttentionSpec(head_map="heads"),
    }.items(),
)
def test_a_preset_sets_axes(preset, expected):
    axes = {"fixedhead": {"head_dim": 9}, "gqa": {"key_value_heads": 2}}.get(preset, {})
    assert AttentionSpec.from_preset(preset, **axes) == expected


def test_an_axis_beside_a_preset_wins_and_none_leaves_it():
    chosen = AttentionSpec.from_preset(
        "mixhead-b", mixing="static", activation="sigsoftmax", head_dim=7, projection=None
    )
    assert chosen == AttentionSpec(head_dim=7, activation="sigsoftmax", mixing="static")
    assert AttentionSpec.from_preset("mixhead-b", mixing=None).mixing == "positionwise"


@pytest.mark.parametrize(
    ("preset", "options", "message"),
    [
        ("mixhead", {}, "attention method 'mixhead': expected one of mha, fixedhead, gqa"),
        (
            "mha",
            {"scores": "cosine"},
            "unknown attention axis scores: expected head_dim, value_dim, key_value_heads, projection, score, score_mixing, activation, mixing",
        ),
        ("mha", {"projection": "lowrank"}, "projection='lowrank': expected one of .*multi-query"),
        (
            "mha",
            {"score": "cosine"},
            "score='cosine': expected one of dot-product, relative, synthesizer-dense, synthesizer-random",
        ),
        ("mha", {"activation": "relu"}, "activation='relu': expected one of softmax, sigsoftmax"),
        (
            "mha",
            {"mixing": "dense"},
            "mixing='dense': expected one of none, dynamic, static, positionwise, random, average",
        ),
        ("mha", {"head_dim": 0}, "head_dim=0: expected a positive integer"),
        (
            "fixedhead",
            {},
            r"'fixedhead' needs a head size: the paper sets it to the sequence length\. Give it with --head-dim N",
        ),
        (
            "gqa",
            {},
            r"'gqa' needs a number of key and value heads: the paper takes 8 for 64 heads\. Give it with --key-value-heads N",
        ),
        ("gqa", {"key_value_heads": 2}, "key_value_heads=2: expected a divisor of num_heads=3"),
        ("gqa", {"key_value_heads": 6}, "key_value_heads=6: expected a divisor of num_heads=3"),
        ("mha", {"key_value_heads": 0}, "key_value_heads=0: expected a positive integer"),
        ("mqa", {"key_value_heads": 3}, "key_value_heads=3: projection 'multi-query' expects none or 1"),
        ("sha", {"key_value_heads": 1}, "key_value_heads=1: projection 'single' expects none"),
        ("el", {"key_value_heads": 3}, "key_value_heads=3: projection 'el' expects none"),
        ("mhe-mul", {"key_value_heads": 1}, "key_value_heads=1: projection 'head-embedding-mul' expects none"),
        ("mhe-add", {"key_value_heads": 3}, "key_value_heads=3: projection 'head-embedding-add' expects none"),
        ("mha", {"num_heads": 5}, "embed_dim=12 is not divisible by num_heads=5: .*give a head size"),
        ("mha", {"num_heads": 0}, "num_heads=0: expected a positive integer"),
        ("el", {"head_dim": 5}, "head_dim=5: projection 'el' cuts the hidden states into heads. Set .* = 4"),
        (
            "el",
            {"kdim": 8, "vdim": 8},
            "kdim=8: projection 'el' uses the hidden states as keys. Set kdim = embed_dim = 12",
        ),
        ("el", {"vdim": 8}, "vdim=8: projection 'el' uses the keys as values. Set vdim = kdim = 12"),
        ("skv", {"kdim": 8}, "vdim=12: projection 'shared-kv' uses the keys as values. Set vdim = kdim = 8"),
        ("mha", {"backend": "flash"}, "backend='flash': expected one of auto, reference, sdpa"),
        (
            "talking-heads",
            {"backend": "sdpa"},
            "backend='sdpa' cannot compute head mixing of scores, before the softmax; use",
        ),
        ("mixhead-a", {"backend": "sdpa", "dropout": 0.1}, "'sdpa' cannot compute dropout after head mixing; use"),
        ("mha", {"backend": "sdpa", "activation": "sigsoftmax"}, "'sdpa' cannot compute the activation sigsoftmax"),
        ("mha", {"dropout": 1.0}, "dropout=1.0: expected a number with 0 <= dropout < 1"),
    ],
)
def test_bad_choices_are_refused(preset, options, message):
    with pytest.raises(ValueError, match=message):
        build_attention(preset, **{"embed_dim": 12, "num_heads": 3} | options)


def test_a_head_size_frees_the_number_of_heads():
    assert build_attention("mha", 12, 5, head_dim=4).out_proj.weight.shape == (12, 20)


def test_help_names_every_axis_and_its_example_runs():
    text = inspect.getdoc(attention.build_attention)
    assert not [axis for axis in attention.AXES if f"``{axis}``" not in text]
    example = textwrap.dedent(text.partition("::\n")[2].partition("Args:")[0])
    exec(compile(example, "build_attention", "exec"), {"torch": torch, **vars(attention)})


@pytest.mark.parametrize("package", [attention, ops])
def test_help_shows_no_address_of_an_object(package):
    functions = [getattr(package, name) for name in package.__all__ if callable(getattr(package, name))]
    assert not [function for function in functions if "0x" in pydoc.plaintext.document(function)]
