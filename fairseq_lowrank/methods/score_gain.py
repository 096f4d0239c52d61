"""A learned factor of each head's scores: the control of every claim about mixing of scores."""

from __future__ import annotations

from fairseq_lowrank.methods.mixhead import FactorOfHead
from fairseq_lowrank.methods.standard import CACHED, PARAMETERS
from fairseq_lowrank.parts import Method, register

register(
    Method(
        name="score-gain",
        title="A factor of each head's scores",
        formula="S'_i = a_i S_i   P_i = softmax(S'_i),   a learned, from 1",
        parts={"score_mixing": FactorOfHead},
        parameters=f"{PARAMETERS} + h",
        cached=CACHED,
        kind="equal",
        notes=(
            "The twin of `gain` before the softmax: a temperature of each head, only the diagonal of L. The projection of queries "
            "absorbs it exactly: a_i Q_i = x (a_i W_Q,i). So it can express the same as `mha`, and differs only in training. Masks "
            "and biases are added to the multiplied scores. `--mixing-lr-scale` sets its rate."
        ),
        use_if="you need a control for mixing of scores: it can sharpen heads and cannot mix them",
        colour="#7f7f3f",
    )
)
