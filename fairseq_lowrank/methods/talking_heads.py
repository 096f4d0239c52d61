"""Talking heads: mixing before and after the softmax, and mixing before it alone."""

from __future__ import annotations

from torch import Tensor

from fairseq_lowrank.methods.mixhead import StaticMatrix
from fairseq_lowrank.methods.standard import CACHED, PARAMETERS
from fairseq_lowrank.parts import Method, Mixing, Paper, register


class StaticScoreMatrix(Mixing):
    """S'_i = Σ_j L[j, i] S_j with L learned, from I (talking heads, Shazeer et al. 2020, arXiv 2003.02436)."""

    name = "static"

    def matrix(self) -> Tensor:
        return self.weight


TALKING_HEADS = Paper("Talking-heads attention", "Shazeer et al. 2020", "https://arxiv.org/abs/2003.02436")

register(
    Method(
        name="talking-heads",
        title="Talking heads: mixing before and after the softmax",
        formula=(
            "S_i = Q_i K_iᵀ / √d_k   S'_i = Σ_j L[j, i] S_j   P_i = softmax(S'_i)   P̄_i = Σ_j M[j, i] P_j   O_i = P̄_i V_i,   L "
            "and M learned, from I"
        ),
        parts={"score_mixing": StaticScoreMatrix, "mixing": StaticMatrix},
        parameters=f"{PARAMETERS} + 2·h²",
        cached=CACHED,
        kind="QK",
        papers=(TALKING_HEADS,),
        colour="#6000c0",
    )
)

register(
    Method(
        name="score-mixing",
        title="Mixing of scores, before the softmax alone",
        formula="S_i = Q_i K_iᵀ / √d_k   S'_i = Σ_j L[j, i] S_j   P_i = softmax(S'_i)   O_i = P_i V_i,   L learned, from I",
        parts={"score_mixing": StaticScoreMatrix},
        parameters=f"{PARAMETERS} + h²",
        cached=CACHED,
        kind="QK",
        papers=(TALKING_HEADS,),
        colour="#00c878",
    )
)
