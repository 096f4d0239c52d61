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
        colour="#e06040",
        preset=False,
    )
)
