"""The project's own measurements of heads that are smaller than the sequence length, with their limits.

`tests/tools/test_measured.py` computes every number again from the records in `results/`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

LIMITS = (
    "Measured by this project, docs/evidence.md. The models are small (width 32 to 128), trained on a CPU with 2 to 5 "
    "seeds, and mostly at one learning rate. Bits are a token's, on training pairs without dropout; more is better for a lead."
)


@dataclass(frozen=True)
class Measurement:
    """One result of docs/evidence.md: the change, its effect, and the limits of the measurement.

    `text` and `limits` contain a field in braces for each of `numbers`.
    """

    change: str
    text: str
    limits: str
    numbers: dict[str, float]
    section: str

    def as_dict(self) -> dict:
        said = {name: getattr(self, name).format(**self.numbers) for name in ("text", "limits")}
        return asdict(self) | said


HEAD_EMBEDDINGS = {"behind_mha": 0.467, "ahead_of_sha": 0.009}
"""Differences in bits of fit: mhe-mul behind mha of the same size, and ahead of sha (four sentences concatenated, 3 seeds)."""

MEASURED = (
    Measurement(
        "mixing of scores (--score-mixing static)",
        "squared error {mixed} instead of {plain} with 8 heads of 4; mixing after the softmax leaves {after}",
        "a task that needs one score of full rank, 3 seeds; not measured in translation or language models",
        {"mixed": 0.015, "plain": 0.818, "after": 0.736},
        "nearest point",
    ),
    Measurement(
        "fewer, larger heads",
        "4 heads of 32 end {lead} bits ahead of 32 heads of 4 in translation",
        "3 seeds, one rate; with a half-scale start for both it is {small_start} bits",
        {"lead": 0.254, "small_start": 0.101},
        "fast start",
    ),
    Measurement(
        "larger heads at the same number (--attention fixedhead)",
        "32 heads of 32 end {behind} bits behind a model with as many parameters in its feed-forward layers",
        "four sentences concatenated, 3 seeds; neither model finds the source at the one rate that was tried",
        {"behind": 0.788},
        "above the head size",
    ),
    Measurement(
        "a half-scale start (output projections initialised at half)",
        "leads by {large} bits with heads of 32 and {small} with heads of 4, without a parameter more",
        "3 seeds at 2e-3; at 4e-3 it fails under 2 seeds of 3. The plugin examples/evidence/controls has it",
        {"large": 0.233, "small": 0.385},
        "fast start",
    ),
    Measurement(
        "pre-norm (--encoder-normalize-before --decoder-normalize-before)",
        "leads by {lead} bits with heads of 32",
        "3 seeds at 2e-3",
        {"lead": 0.131},
        "fast start",
    ),
    Measurement(
        "a gain for each head at mixing's learning rate (--attention gain --mixing-lr-scale HEADS)",
        "without the scale gain leads by {plain} bits with 4 heads of 32, and by {fast} at 4e-3",
        "3 seeds; a gain cannot mix, and without the scale it learns slower than the sum of a column of M",
        {"plain": 0.054, "fast": 0.247},
        "fast start",
    ),
    Measurement(
        "mixing after the softmax (--attention mixhead-a)",
        "leads by {large} bits with heads of 32, {small} with heads of 4, and {fast} with heads of 32 at 4e-3",
        "3 seeds; most of the lead with heads of 32 is damping. A head's scores keep their rank",
        {"large": 0.105, "small": 0.258, "fast": 0.258},
        "fast start",
    ),
)
