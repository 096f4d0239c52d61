"""What a preset leaves to whoever chooses it, for tests that go through all presets."""

NEEDED_AXES = {"fixedhead": {"head_dim": 4}, "gqa": {"key_value_heads": 1}}
"""Sizes that fit any number of heads."""


def needed_axes(preset):
    return NEEDED_AXES.get(preset, {})
