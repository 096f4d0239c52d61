"""Sigsoftmax in place of softmax."""

from __future__ import annotations

from fairseq_lowrank.methods.mixhead import MIXHEAD
from fairseq_lowrank.methods.standard import CACHED, PARAMETERS
from fairseq_lowrank.ops.activation import SigSoftmax
from fairseq_lowrank.parts import Method, Paper, register

register(
    Method(
        name="sigsoftmax",
        title="Sigsoftmax in place of softmax",
        formula="P_i[t, s] ∝ exp(a) σ(a)   with the score a = (Q_i K_iᵀ / √d_k)[t, s],   computed as softmax(a + log σ(a))",
        parts={"activation": SigSoftmax},
        parameters=PARAMETERS,
        cached=CACHED,
        papers=(
            Paper(
                "Sigsoftmax: reanalysis of the softmax bottleneck",
                "Kanai et al. 2018",
                "https://arxiv.org/abs/1805.10829",
            ),
            MIXHEAD,
        ),
        notes=(
            "Log-probabilities are not the scores minus a constant in each row, so their rank can exceed that of the scores. It is "
            "not invariant under a shift of a row, so a constant in a row has an effect. It is an activation, so it works with "
            "every preset."
        ),
        use_if="the rank of log-probabilities should exceed that of scores",
        colour="#17becf",
        preset=False,
    )
)
