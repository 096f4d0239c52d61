"""Attention sinks: a learned score in each row, whose weight reads no value."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fairseq_lowrank.methods.standard import CACHED, PARAMETERS
from fairseq_lowrank.ops import AttentionCall
from fairseq_lowrank.parts import AttentionConfig, Context, LayerPart, Method, Paper, register
from fairseq_lowrank.parts.plain import Inexact


class LearnedSinks(LayerPart):
    """P_i[t, s] = exp(S_i[t, s]) / (exp(a_i) + Σ_r exp(S_i[t, r])), with one learned a_i for each head, from 0.

    Source: gpt-oss (arXiv 2508.10925; ``eager_attention_forward`` of its model in ``transformers``). A head can attend to nothing:
    its weights sum to less than 1. With a_i → −∞ it is plain attention.
    """

    name = "learned"
    reads_inputs = reads_queries = False

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_heads * config.queries_per_head))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    @property
    def keeps_stock(self) -> bool:
        return False

    @property
    def rows_sum_to_one(self) -> bool:
        return False

    def fold(self, layer: Any) -> None:
        raise Inexact("weights sum to less than 1")

    def call(self, call: AttentionCall, context: Context) -> AttentionCall:
        return call.adding(sinks=self.weight.clone())  # FSDP frees the weight as soon as this module returns


register(
    Method(
        name="sinks",
        title="Attention sinks: heads may attend to nothing",
        formula="P_i[t, s] = exp(S_i[t, s]) / (exp(a_i) + Σ_r exp(S_i[t, r])),   a: h, from 0",
        parts={"attention_sinks": LearnedSinks},
        parameters=f"{PARAMETERS} + h",
        cached=CACHED,
        kind="OV",
        papers=(Paper("gpt-oss-120b and gpt-oss-20b model card", "OpenAI 2025", "https://arxiv.org/abs/2508.10925"),),
        colour="#86bcb6",
    )
)
