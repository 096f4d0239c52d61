"""Exclusive self-attention: heads leave out what the position itself says."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_lowrank.methods.standard import CACHED, PARAMETERS
from fairseq_lowrank.ops.activation import at_least_float32, without_autocast
from fairseq_lowrank.parts import Method, Paper, register
from fairseq_lowrank.parts.head_output import HeadOutput
from fairseq_lowrank.parts.parameters import no_weight_decay
from fairseq_lowrank.parts.projection import AttentionDims


class Exclusive(HeadOutput):
    """O_i − tanh(α_i)·(O_i·v̂) v̂ with v̂ = v_i,t / ‖v_i,t‖, the value of head i at the query's own position; α from 0.

    Source: XSA (arXiv 2603.09078). With α → ∞ nothing of the own value is left. Self-attention only. A value of length 0 has no
    direction, so nothing is subtracted.
    """

    name = "exclusive"
    reads_own_value = True

    def __init__(self, dims: AttentionDims) -> None:
        super().__init__(dims)
        self.weight = no_weight_decay(torch.zeros(dims.num_heads))

    def forward(self, heads: Tensor, inputs: Tensor, values: Tensor | None) -> Tensor:
        assert values is not None
        # float16 has no number as small as the least length that normalisation divides by
        with without_autocast(heads):
            wide = at_least_float32(heads)
            direction = torch.nn.functional.normalize(at_least_float32(values), dim=-1)
            own = (wide * direction).sum(dim=-1, keepdim=True) * direction
            return (wide - torch.tanh(at_least_float32(self.weight))[:, None, None] * own).to(heads.dtype)


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
        notes=(
            "A head removes the direction of the value at the same position, which the residual connection already carries. At "
            "first it equals `mha`. Cross attention has no own value: with an encoder and a decoder, add `--attention-sites "
            "encoder,decoder`."
        ),
        use_if="attention should carry only what the position does not have itself",
        colour="#ffbb78",
    )
)
