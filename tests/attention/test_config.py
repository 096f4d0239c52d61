"""The configuration of a layer: sizes follow from choices, and its parts read the same configuration."""

from dataclasses import FrozenInstanceError, replace

import pytest

from fairseq_lowrank.attention import AttentionConfig, AttentionSpec, MultiheadAttention, RotaryPositions

RESOLVED = ("kdim", "vdim", "head_dim", "value_dim", "key_value_heads", "queries_per_head", "has_appended_keys")


@pytest.mark.parametrize(
    ("choices", "sizes", "expected"),
    [
        ({}, {}, (12, 12, 4, 4, 3, 1, False)),
        ({"head_dim": 5}, {"kdim": 7}, (7, 12, 5, 5, 3, 1, False)),
        ({"head_dim": 5, "value_dim": 2}, {"vdim": 9}, (12, 9, 5, 2, 3, 1, False)),
        ({"key_value_heads": 1, "head_output": "difference"}, {"add_zero_attn": True}, (12, 12, 4, 4, 1, 2, True)),
    ],
)
def test_sizes_follow_from_choices(choices, sizes, expected):
    config = AttentionConfig(AttentionSpec(**choices), 12, 3, **sizes)
    assert tuple(getattr(config, name) for name in RESOLVED) == expected
    with pytest.raises(FrozenInstanceError):
        config.head_dim = 8


def test_sizes_follow_from_other_choices_in_a_copy():
    config = AttentionConfig(AttentionSpec(head_dim=5), 12, 3)
    assert replace(config, spec=AttentionSpec()) == AttentionConfig(AttentionSpec(), 12, 3)


@pytest.mark.parametrize("rotary", [None, RotaryPositions(100.0)])
def test_a_projection_with_features_for_positions_turns_them(rotary):
    spec = AttentionSpec(projection="latent", rotary_dim=2, head_output="head-gate")
    layer = MultiheadAttention(AttentionConfig(spec, 8, 2, self_attention=True, rotary=rotary))
    assert layer.config is layer.projection.config is layer.head_output.config
    assert layer.rotary is layer.config.rotary and layer.rotary.base == (10000.0 if rotary is None else 100.0)
