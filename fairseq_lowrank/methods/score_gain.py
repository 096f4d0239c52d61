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
        colour="#bdbdbd",
    )
)
