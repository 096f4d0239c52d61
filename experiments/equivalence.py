"""The test that a difference is small: two one-sided t-tests (TOST) against a margin that was stated.

"No difference" needs this test: a p of difference above 0.05 only means that no difference was found.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fairseq_lowrank.records.statistics import standard_error, t_below


def equivalence_p(values: Sequence[float], margin: float, resolution: float = 0.0) -> float | None:
    """Return the p of two one-sided t-tests that the mean lies within ± margin; ``None`` for fewer than two values.

    Args:
        resolution: see :func:`~fairseq_lowrank.records.statistics.student`.

    Raises:
        ValueError: the margin is not above 0.
    """
    if not margin > 0:
        raise ValueError(f"margin {margin}: expected a number above 0")
    if len(values) < 2:
        return None
    array = np.asarray(values, dtype=float)
    nearer, error = margin - abs(float(array.mean())), standard_error(array, resolution)
    if error == 0:
        return 0.0 if nearer > 0 else 1.0
    return t_below(-nearer / error, len(values) - 1)
