"""The project's own measurements of changes, the models that they apply to, and the time that changes took.

The measurements are in ``measured.json``. `tests/tools/test_measured.py` computes every number again from the records in `results/`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

LIMITS = (
    "Measured by this project, docs/evidence.md. The models are small (width 32 to 384), trained on a CPU, and mostly at one "
    "learning rate. Bits are a token's; more is better for a lead."
)
PUBLISHED = (
    "For comparison, published models on WikiText-2 and film reviews. At the default tolerance "
    "all-MiniLM-L6-v2 uses between 25 and 29 of its heads' 32 directions, paraphrase-MiniLM-L3-v2 between 16 and 25 of 32, "
    "SmolLM2-135M-Instruct between 45 and 54 of 64, and gemma-3-270m between 133 and 229 of 256."
)
"""The least need from below and the greatest from above, over the rows of docs/evidence/published-models.md at the default tolerance."""
TRANSLATION, PRE_NORM_TRANSLATION = "post-norm encoder-decoder", "pre-norm encoder-decoder"
LANGUAGE_MODEL, ENCODER, SYNTHETIC = "pre-norm decoder", "encoder", "synthetic task"
KINDS = (TRANSLATION, PRE_NORM_TRANSLATION, LANGUAGE_MODEL, ENCODER)
"""The kinds of models with measurements."""
SCORES = "mixing of scores (--score-mixing static)"
FEWER, MIXHEAD = "fewer, larger heads", "mixing after the softmax (--attention mixhead-a)"

TIMES = {SCORES: 1.6, MIXHEAD: 1.5, FEWER: 0.7}
"""Time of an update by change, in times of plain attention with 32 heads of 4 (``benchmarks/training.py``, width 128, one CPU core).

Fewer heads are 4 of 32. Mixing is that of 32 heads."""
HEAD_EMBEDDINGS = {"behind_mha": 0.467, "ahead_of_sha": 0.009}
"""Differences in bits of fit: mhe-mul behind mha of the same size, and ahead of sha (four sentences concatenated, 3 seeds)."""


@dataclass(frozen=True)
class Measurement:
    """One result of docs/evidence.md: the change, the kind of model, the effect, and the limits of the measurement.

    `text` and `limits` contain a field in braces for each of `numbers`.
    """

    change: str
    applies: str
    text: str
    limits: str
    numbers: dict[str, float]

    def as_dict(self) -> dict:
        said = {name: getattr(self, name).format(**self.numbers) for name in ("text", "limits")}
        found = {one.applies for one in MEASURED if one.change == self.change}
        return asdict(self) | said | {"not_measured_in": [kind for kind in KINDS if kind not in found]}


_RECORDS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
MEASURED = tuple(Measurement(**record) for record in _RECORDS)


def measured_in(kind: str) -> list[Measurement]:
    """Return the measurements of a kind of model, and of synthetic tasks for changes that were not measured in it."""
    own = [one for one in MEASURED if one.applies == kind]
    changes = {one.change for one in own}
    return own + [one for one in MEASURED if one.applies == SYNTHETIC and one.change not in changes]
