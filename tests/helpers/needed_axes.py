"""What a preset leaves to whoever chooses it, and the presets and axes that combine freely, for tests that go through all."""

from dataclasses import replace

from fairseq_lowrank.attention import AXES as ALL_AXES
from fairseq_lowrank.attention import METHODS
from fairseq_lowrank.attention import PRESETS as ALL_PRESETS
from fairseq_lowrank.parts import PARTS

PROJECTIONS = {name: part for name, part in PARTS["projection"].items() if not part.options}
AXES = {
    name: replace(
        axis,
        choices={"projection": PROJECTIONS}.get(name, axis.choices and [c for c in axis.choices if c != "dynamic"]),
    )
    for name, axis in ALL_AXES.items()
    if name not in ("head_map", "head_output", "score_bias", "attention_sinks") and not axis.readers
}
"""The axes and values that combine freely. tests/methods compares the others with their formulas."""

PRESETS = {
    preset: sets
    for preset, sets in ALL_PRESETS.items()
    if all(axis in AXES and value in AXES[axis].choices for axis, value in sets.items())
}


def needed_axes(preset):
    """The size that a preset needs, from its first example, which fits any number of heads."""
    need = METHODS[preset].needs
    return {} if need is None else {need.axis: METHODS[preset].examples[0][need.axis]}
