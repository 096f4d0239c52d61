"""Differential attention: the difference of two attention patterns over one value."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_lowrank.methods.standard import CACHED
from fairseq_lowrank.ops.activation import at_least_float32
from fairseq_lowrank.parts import Method, Paper, register
from fairseq_lowrank.parts.head_output import HeadOutput
from fairseq_lowrank.parts.projection import AttentionDims
from fairseq_lowrank.parts.stages import Context


class Difference(HeadOutput):
    """O_i = O_{2i} − σ(x w_i) O_{2i+1}: two heads of queries share the key and value of head i; w_i: d from 0.

    Source: Differential Transformer V2 (``Diff-Transformer-V2`` of microsoft/unilm, ``multihead_flashdiffv2.py``). There are 2·h heads
    of queries for h heads of keys and values.
    """

    name = "difference"
    heads_per_output = 2
    changes_queries = True

    def __init__(self, dims: AttentionDims) -> None:
        super().__init__(dims)
        self.weight = nn.Parameter(torch.zeros(dims.num_heads, dims.embed_dim))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    @property
    def keeps_stock(self) -> bool:
        return False

    def heads(self, heads: Tensor, context: Context) -> Tensor:
        return self.weights(heads, context)

    def weights(self, weights: Tensor, context: Context) -> Tensor:
        assert context.inputs is not None
        factors = torch.sigmoid(nn.functional.linear(context.inputs, at_least_float32(self.weight))).transpose(1, 2)[
            ..., None
        ]
        first, second = weights.unflatten(1, (-1, 2)).unbind(dim=2)
        return first - factors.to(weights.dtype) * second


register(
    Method(
        name="diff",
        title="Differential attention: one pattern less another",
        formula="O_i = P_2i V_i − σ(x w_i) P_2i+1 V_i,   w_i: d → 1, from 0",
        parts={"head_output": Difference},
        parameters="5·d·h·d_k + d·h",
        cached=CACHED,
        kind="OV",
        papers=(
            Paper(
                "Differential Transformer, in its second version",
                "Microsoft, Diff-Transformer-V2",
                "https://github.com/microsoft/unilm/tree/master/Diff-Transformer",
            ),
        ),
        notes=(
            "Two heads of queries share the key and value of head i, as in the authors' second version. There are 2h heads of "
            "queries, so queries have twice the parameters. It does not equal `mha` at first. `--load-alignments` refuses it, "
            "because its weights can be negative. With a constant factor it is plain attention of 2h heads."
        ),
        use_if="attention spreads over irrelevant tokens",
        colour="#00a8e8",
    )
)
