"""Dynamically composable heads: each query mixes scores and probabilities by matrices that it computes from its input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_lowrank.methods.standard import CACHED, PARAMETERS
from fairseq_lowrank.ops import HeadMixing, PositionwiseMixing
from fairseq_lowrank.ops.activation import at_least_float32, without_autocast
from fairseq_lowrank.parts import AttentionConfig, LayerPart, Method, Mixing, Option, Paper, register


class DynamicMixing(Mixing):
    """M_t = I + Σ_{ρ≤R} w1_ρ(x_t) w2_ρ(x_t)ᵀ + diag(tanh(x_t W_d)) with w1_ρ, w2_ρ: d→h linear, w2 and W_d from 0.

    Source: dynamically composable multi-head attention (Xiao et al. 2024, arXiv 2405.08553), its query-wise part; details from
    ``pytorch/dcformer`` of ``Caiyun-AI/DCFormer``, whose hidden layer and norm of w1 are left out.
    """

    name = "dynamic"
    reads_inputs = True
    options = (Option("factor_rank", "rank of the mixing of each query (default 2)", flag="rank", letter="r"),)

    def __init__(self, config: AttentionConfig, query_size: int, factor_rank: int | None = None) -> None:
        LayerPart.__init__(self)
        self.num_heads, self.factor_rank = config.num_heads, factor_rank or 2
        rows, embed_dim = self.factor_rank * config.num_heads, config.embed_dim
        self.first = nn.Parameter(torch.empty(rows, embed_dim))
        self.second = nn.Parameter(torch.empty(rows, embed_dim))
        self.diagonal = nn.Parameter(torch.empty(config.num_heads, embed_dim))
        self.register_parameter("query_weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.first)
        nn.init.zeros_(self.second)
        nn.init.zeros_(self.diagonal)

    def fixed_matrix(self) -> Tensor | None:
        if self.second.any() or self.diagonal.any():
            return None
        return torch.eye(self.num_heads, dtype=self.first.dtype, device=self.first.device)

    def set_matrix(self, matrix: Tensor) -> None:
        """Only the identity is the same for all queries, and the initial M."""
        self.reset_parameters()

    def operation(self, query: Tensor | None, inputs: Tensor | None = None) -> HeadMixing:
        """Return the operation on the heads at each query of ``inputs [B, T, embed_dim]``."""
        assert inputs is not None
        with without_autocast(inputs):
            inputs = at_least_float32(inputs)
            first, second, diagonal = (
                F.linear(inputs, at_least_float32(w)) for w in (self.first, self.second, self.diagonal)
            )
            first, second = (tensor.unflatten(-1, (-1, self.num_heads)) for tensor in (first, second))
            identity = torch.eye(self.num_heads, dtype=inputs.dtype, device=inputs.device)
            return PositionwiseMixing(identity + first.mT @ second + torch.diag_embed(torch.tanh(diagonal)))

    def extra_repr(self) -> str:
        return f"{self.num_heads} heads, rank {self.factor_rank}"


register(
    Method(
        name="dcmha",
        title="Dynamically composable heads: each query mixes scores and probabilities",
        formula=(
            "M_t = I + Σ_ρ w1_ρ(x_t) w2_ρ(x_t)ᵀ + diag(tanh(x_t W_d))   for ρ = 1 … r\n"
            "S'_i[t] = Σ_j L_t[j, i] S_j[t]   P̄_i[t] = Σ_j M_t[j, i] P_j[t],   w2 and W_d from 0, L_t built like M_t"
        ),
        parts={"score_mixing": DynamicMixing, "mixing": DynamicMixing},
        parameters=f"{PARAMETERS} + 4·d·h·r + 2·d·h",
        cached=CACHED,
        kind="QK",
        papers=(
            Paper(
                "Improving Transformers with dynamically composable multi-head attention",
                "Xiao et al. 2024",
                "https://arxiv.org/abs/2405.08553",
            ),
        ),
        examples=({"factor_rank": 2},),
        colour="#7f0000",
    )
)
