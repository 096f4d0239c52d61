"""Exclusive self-attention: heads leave out what the position itself says."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_lowrank.methods.standard import CACHED, PARAMETERS
from fairseq_lowrank.ops.activation import without_autocast
from fairseq_lowrank.parts import AttentionConfig, Method, Paper, register
from fairseq_lowrank.parts.head_output import HeadOutput
from fairseq_lowrank.parts.stages import Context


class Exclusive(HeadOutput):
    """O_i − tanh(α_i)·(O_i·v̂) v̂ with v̂ = v_i,t / ‖v_i,t‖, the value of head i at the query's own position; α from 0.

    Source: XSA (arXiv 2603.09078). With α → ∞ nothing of the own value is left. Self-attention only. A value of length 0 has no
    direction, so nothing is subtracted.
    """

    name = "exclusive"
    reads_inputs = reads_queries = False
    reads_own_value = True

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.zeros(config.num_heads))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def heads(self, heads: Tensor, context: Context) -> Tensor:
        assert context.own_values is not None
        with without_autocast(heads):
            direction = nn.functional.normalize(context.own_values, dim=-1)
            own = (heads * direction).sum(dim=-1, keepdim=True) * direction
            return heads - torch.tanh(self.weight)[:, None, None] * own


register(
    Method(
        name="xsa",
        title="Exclusive self-attention: without the position's own value",
        formula="O_i[t] = P_i[t] V_i − tanh(α_i) (P_i[t] V_i · v̂_t) v̂_t,   v̂_t = V_i[t] / ‖V_i[t]‖, α from 0",
        parts={"head_output": Exclusive},
        parameters=f"{PARAMETERS} + h",
        cached=CACHED,
        kind="OV",
        papers=(Paper("Exclusive self-attention", "Zhai 2026", "https://arxiv.org/abs/2603.09078"),),
        colour="#ffbb78",
    )
)
