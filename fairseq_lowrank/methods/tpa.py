"""Tensor product attention: queries, keys and values as sums of products of a head factor and a feature factor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fairseq_lowrank.parts import AttentionConfig, Method, Paper, register
from fairseq_lowrank.parts.part import Option
from fairseq_lowrank.parts.projection import (
    AttentionInputs,
    KeyValueStates,
    Layer,
    Projection,
)


class TensorProduct(Projection):
    """k_i(y) = (1/R) Σ_ρ a_ρ(y)_i b_ρ(y), with a_ρ: d→h and b_ρ: d→d_k linear; values alike, queries with their own rank.

    Source: TPA (Zhang et al. 2025, arXiv 2501.06425, equations 3.1 to 3.3); details from ``model/T6.py`` of ``tensorgi/TPA``,
    without its rotary part. A token caches the factors, R·(2h + d_k + d_v) numbers. R is ``factor_rank`` (default 2), the rank of
    queries ``query_rank`` (default 6).
    """

    name = "tensor-product"
    key_state, value_state = "key_features", "value_features"
    keys_reason = "it caches factors of keys, not keys"
    groups = ()
    composes = False
    options = (
        Option("factor_rank", "number of products of keys and values (default 2)", flag="rank", letter="r"),
        Option("query_rank", "number of products of queries (default 6)", letter="r_q"),
    )

    def __init__(self, config: AttentionConfig, factor_rank: int | None = None, query_rank: int | None = None) -> None:
        super().__init__(config)
        self.factor_rank, self.query_rank = factor_rank or 2, query_rank or 6
        self.state_heads = 1
        self.state_sizes = {
            "key_heads": self.factor_rank * config.num_heads,
            "key_features": self.factor_rank * config.head_dim,
            "value_heads": self.factor_rank * config.num_heads,
            "value_features": self.factor_rank * config.value_dim,
        }

    @property
    def key_heads(self) -> int:
        return self.config.num_heads

    def build_projections(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | None]:
        config = self.config
        return {
            "k_heads_proj": linear(config.kdim, self.factor_rank * config.num_heads, bias=False),
            "v_heads_proj": linear(config.vdim, self.factor_rank * config.num_heads, bias=False),
            "q_heads_proj": linear(config.embed_dim, self.query_rank * config.num_heads, bias=False),
            "k_proj": linear(config.kdim, self.factor_rank * config.head_dim, bias=False),
            "v_proj": linear(config.vdim, self.factor_rank * config.value_dim, bias=False),
            "q_proj": linear(config.embed_dim, self.query_rank * config.head_dim, bias=False),
        }

    def project_query(self, layer: Layer, query: Tensor) -> Tensor:
        heads, features = (factor(query).transpose(0, 1) for factor in (layer.q_heads_proj, layer.q_proj))
        return self._product(heads, features, self.query_rank)

    def project_key_value(self, layer: Layer, key: Tensor, value: Tensor) -> KeyValueStates:
        projected = {
            "key_heads": layer.k_heads_proj(key),
            "key_features": layer.k_proj(key),
            "value_heads": layer.v_heads_proj(value),
            "value_features": layer.v_proj(value),
        }
        return {name: tensor.transpose(0, 1)[:, None] for name, tensor in projected.items()}

    def attention_inputs(self, layer: Layer, q: Tensor, states: KeyValueStates, **needs: bool) -> AttentionInputs:
        keys = self._product(states["key_heads"][:, 0], states["key_features"][:, 0], self.factor_rank)
        return AttentionInputs(q, keys, self.expand_values(layer, states))

    def expand_values(self, layer: Layer, states: KeyValueStates) -> Tensor:
        return self._product(states["value_heads"][:, 0], states["value_features"][:, 0], self.factor_rank)

    @staticmethod
    def _product(heads: Tensor, features: Tensor, rank: int) -> Tensor:
        """Return ``[B, H, N, D]`` from head factors ``[B, N, R·H]`` and feature factors ``[B, N, R·D]``."""
        heads, features = (tensor.unflatten(-1, (rank, -1)) for tensor in (heads, features))
        return torch.matmul(heads.mT, features).transpose(1, 2) / rank


register(
    Method(
        name="tpa",
        title="Tensor product attention, without its rotary part",
        formula=(
            "K_i(y) = 1/r Σ_ρ a_ρ(y)_i b_ρ(y),   a_ρ: d → h, b_ρ: d → d_k linear\n"
            "V_i likewise, Q_i likewise with r_q products"
        ),
        parts={"projection": TensorProduct},
        parameters="2·d·h·r + 2·d·d_k·r + d·h·r_q + d·d_k·r_q + h·d_k·d",
        cached="2·h·r + 2·d_k·r",
        kind="patterns",
        papers=(
            Paper("Tensor product attention is all you need", "Zhang et al. 2025", "https://arxiv.org/abs/2501.06425"),
        ),
        examples=({"factor_rank": 2, "query_rank": 3},),
        colour="#d4b106",
    )
)
