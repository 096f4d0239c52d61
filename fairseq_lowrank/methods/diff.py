"""Differential attention: the difference of two attention patterns over one value."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_lowrank.methods.standard import CACHED
from fairseq_lowrank.ops.activation import at_least_float32, without_autocast
from fairseq_lowrank.parts import AttentionConfig, Method, Option, Paper, register
from fairseq_lowrank.parts.head_output import HeadOutput
from fairseq_lowrank.parts.parameters import assign
from fairseq_lowrank.parts.plain import Inexact
from fairseq_lowrank.parts.stages import Context


class Difference(HeadOutput):
    """O_i = O_{2i} − λ O_{2i+1}: two heads of queries share the value of head i.

    Version 2 has λ = σ(x w_i), w_i: d from 0, and one key for both heads. Source: Differential Transformer V2
    (``Diff-Transformer-V2`` of microsoft/unilm, ``multihead_flashdiffv2.py``).

    Version 1 has a key for each of the two heads, and one λ for a layer: λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init, with vectors of
    size d_k. λ_init = 0.8 − 0.6·exp(−0.3·(depth − 1)) is kept as a buffer, so a state keeps it. Each head's difference is divided by
    its root mean square, multiplied by a gain for each feature that heads share, and by 1 − λ_init. Returned weights are
    P_2i − λ P_2i+1. Source: Differential Transformer (Ye et al. 2024, arXiv 2410.05258, equations 1 to 3; ``multihead_diffattn.py`` of
    microsoft/unilm).
    """

    initial: Tensor
    name = "difference"
    heads_per_output = 2
    changes_queries = True
    reads_queries = False
    options = (
        Option(
            "diff_version",
            "version of the Differential Transformer; version 1 normalises heads and learns one factor for a layer",
            default="2",
            choices=("1", "2"),
        ),
    )

    def __init__(self, config: AttentionConfig, diff_version: str = "2") -> None:
        super().__init__(config)
        self.diff_version = diff_version
        if diff_version == "2":
            self.weight = nn.Parameter(torch.empty(config.num_heads, config.embed_dim))
        else:
            self.vectors = nn.Parameter(torch.empty(4, config.head_dim))
            self.norm = nn.Parameter(torch.empty(config.value_dim))
            self.register_buffer("initial", torch.empty(()))
        self.reset_parameters()

    @classmethod
    def keys_per_output(cls, **options: Any) -> int:
        return 2 if options.get("diff_version") == "1" else 1

    def reset_parameters(self) -> None:
        if self.diff_version == "2":
            nn.init.zeros_(self.weight)
            return
        nn.init.normal_(self.vectors, std=0.1)
        nn.init.ones_(self.norm)
        assign(self.initial, torch.tensor(0.8 - 0.6 * math.exp(-0.3 * (self.config.depth - 1))))

    @property
    def keeps_stock(self) -> bool:
        return False

    def fold(self, layer: Any) -> None:
        raise Inexact("it subtracts one pattern from another")

    def heads(self, heads: Tensor, context: Context) -> Tensor:
        heads = self.weights(heads, context)
        if self.diff_version == "2":
            return heads
        with without_autocast(heads):
            return nn.functional.rms_norm(heads, heads.shape[-1:], self.norm.to(heads), 1e-5) * (1 - self.initial)

    def weights(self, weights: Tensor, context: Context) -> Tensor:
        first, second = weights.unflatten(1, (-1, 2)).unbind(dim=2)
        return first - self.factor(context).to(weights.dtype) * second

    def factor(self, context: Context) -> Tensor:
        """Return λ, ``[B, H, T, 1]`` or ``[]``."""
        if self.diff_version == "1":
            first, second = at_least_float32(self.vectors).unflatten(0, (2, 2)).prod(dim=1).sum(dim=-1).exp()
            return first - second + self.initial
        assert context.inputs is not None
        factors = torch.sigmoid(nn.functional.linear(context.inputs, at_least_float32(self.weight)))
        return factors.transpose(1, 2)[..., None]


register(
    Method(
        name="diff",
        title="Differential attention: one pattern less another",
        formula=(
            "O_i = P_2i V_i − σ(x w_i) P_2i+1 V_i,   w_i: d → 1, from 0\n"
            "with --diff-version 1: O_i = (1 − λ_init) RMSNorm(P_2i V_i − λ P_2i+1 V_i)"
        ),
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
            Paper("Differential Transformer", "Ye et al. 2024", "https://arxiv.org/abs/2410.05258"),
        ),
        examples=({}, {"diff_version": "1"}),
        colour="#00a8e8",
    )
)
