"""Gated attention: each head's output times a sigmoid of the query's input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_lowrank.methods.standard import CACHED, PARAMETERS
from fairseq_lowrank.ops.activation import at_least_float32
from fairseq_lowrank.parts import AttentionConfig, Method, Paper, register
from fairseq_lowrank.parts.head_output import HeadOutput
from fairseq_lowrank.parts.part import Option
from fairseq_lowrank.parts.stages import Context

GATED = Paper(
    "Gated attention for large language models: non-linearity, sparsity, and attention-sink-free",
    "Qiu et al. 2025",
    "https://arxiv.org/abs/2505.06708",
)


GATE_START = Option(
    "gate_start",
    "where the gates start: at 1, or at a half as published, which halves the outputs",
    default="identity",
    choices=("identity", "half"),
)


class HeadGate(HeadOutput):
    """O_i ⊙ 2σ(x w_i), one number for each head, with w_i: d from 0.

    Source: Qiu et al. 2025 (arXiv 2505.06708, head-wise gate after the attention, "G1"). ``gate_start`` ``half`` gives σ as
    published, which halves the outputs at the start; ``identity`` gives 2σ, which starts at 1.
    """

    name = "head-gate"
    reads_queries = False
    options = (GATE_START,)

    def __init__(self, config: AttentionConfig, gate_start: str = "identity") -> None:
        super().__init__(config)
        self.gate_start = gate_start
        self.scale = 2.0 if gate_start == "identity" else 1.0
        self.weight = nn.Parameter(torch.zeros(config.num_heads * self.gates_per_head(config), config.embed_dim))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    @staticmethod
    def gates_per_head(config: AttentionConfig) -> int:
        """Return the number of gates of one head."""
        return 1

    @property
    def keeps_stock(self) -> bool:
        return self.scale == 2.0

    def heads(self, heads: Tensor, context: Context) -> Tensor:
        assert context.inputs is not None
        gates = self.scale * torch.sigmoid(nn.functional.linear(context.inputs, at_least_float32(self.weight)))
        return heads * gates.unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2)


class Gate(HeadGate):
    """O_i ⊙ 2σ(x W_i), one number for each feature of each head, with W_i: d×d_v from 0. See :class:`HeadGate`."""

    name = "gate"

    @staticmethod
    def gates_per_head(config: AttentionConfig) -> int:
        return config.value_dim


register(
    Method(
        name="gated-head",
        title="Gated heads: a sigmoid for each head",
        formula="O_i = 2σ(x w_i) P_i V_i,   w_i: d → 1, from 0",
        parts={"head_output": HeadGate},
        parameters=f"{PARAMETERS} + d·h",
        cached=CACHED,
        kind="OV",
        papers=(GATED,),
        examples=(
            {},
            {"gate_start": "half"},
        ),
        colour="#f7b6d2",
    )
)

register(
    Method(
        name="gated",
        title="Gated attention: a sigmoid for each feature of each head",
        formula="O_i = 2σ(x W_i) ⊙ P_i V_i,   W_i: d × d_k, from 0",
        parts={"head_output": Gate},
        parameters=f"{PARAMETERS} + d·h·d_k",
        cached=CACHED,
        kind="OV",
        papers=(GATED,),
        examples=(
            {},
            {"gate_start": "half"},
        ),
        colour="#c2185b",
    )
)
