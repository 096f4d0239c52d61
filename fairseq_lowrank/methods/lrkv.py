"""Low-rank key and value residuals: one key and value for all heads, and a small difference for each head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_lowrank.ops import AttentionCall
from fairseq_lowrank.parts import AttentionConfig, Method, Paper, register
from fairseq_lowrank.parts.part import Option
from fairseq_lowrank.parts.plain import Plain, Weights, copy_weights, fold_biases, own_weights
from fairseq_lowrank.parts.projection import (
    AttentionInputs,
    KeyValueStates,
    Layer,
    Projection,
    split_heads,
)
from fairseq_lowrank.parts.sizes import LayerSizes


class LowRankKeyValue(Projection):
    """k_i = y W_K + y A_i B_i with A_i: d×r and B_i: r×d_k; values alike.

    Source: LRKV (arXiv 2601.11471). A token caches the shared key and value and y A_i of each head: 2·(d_k + h·r) numbers. B_i is
    absorbed: q_i·k_i = [q_i, q_i B_iᵀ]·[y W_K, y A_i], and for values it is applied to the head's output. With r = d_k every plain
    attention is one of these.
    """

    name = "low-rank-kv"
    keys_reason = "it caches a shared key and factors, and the rest of each head's key is absorbed into queries"
    groups = ()
    factor = "factor_rank"
    composes = False
    options = (
        Option(
            "factor_rank",
            "rank of each head's own part of keys and values (default head size / 4)",
            flag="rank",
            letter="r",
        ),
    )

    def __init__(self, config: AttentionConfig, factor_rank: int | None = None) -> None:
        super().__init__(config)
        self.factor_rank = factor_rank or max(1, config.head_dim // 4)
        heads = config.num_heads
        self.state_sizes = {
            "key": config.head_dim,
            "key_factors": self.factor_rank,
            "value": config.value_dim,
            "value_factors": self.factor_rank,
        }
        self.state_groups = {"key": 1, "key_factors": heads, "value": 1, "value_factors": heads}

    @property
    def key_heads(self) -> int:
        return self.config.num_heads

    def score_rank(self, *, mixed: bool) -> int:
        size, heads = self.config.head_dim, self.config.num_heads
        # the keys of different heads differ by a map of low rank
        return min(heads * size, size + heads * self.factor_rank) if mixed else size

    def build_projections(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | None]:
        config = self.config
        return {
            "k_proj": linear(config.kdim, config.head_dim),
            "v_proj": linear(config.vdim, config.value_dim),
            "q_proj": linear(config.embed_dim, config.num_heads * config.head_dim),
            "k_factor_proj": linear(config.kdim, config.num_heads * self.factor_rank, bias=False),
            "v_factor_proj": linear(config.vdim, config.num_heads * self.factor_rank, bias=False),
        }

    def build_extra_parameters(self) -> dict[str, nn.Module | nn.Parameter]:
        def factors(size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(self.config.num_heads, self.factor_rank, size))

        return {"key_factors": factors(self.config.head_dim), "value_factors": factors(self.config.value_dim)}

    def reset_parameters(self, layer: Layer) -> None:
        for factors in (layer.key_factors, layer.value_factors):
            nn.init.normal_(factors, std=sum(factors.shape[1:]) ** -0.5)

    def project_key_value(self, layer: Layer, key: Tensor, value: Tensor) -> KeyValueStates:
        return {
            "key": split_heads(layer.k_proj(key), self.config.head_dim),
            "key_factors": split_heads(layer.k_factor_proj(key), self.factor_rank),
            "value": split_heads(layer.v_proj(value), self.config.value_dim),
            "value_factors": split_heads(layer.v_factor_proj(value), self.factor_rank),
        }

    def attention_inputs(self, layer: Layer, q: Tensor, states: KeyValueStates, **needs: bool) -> AttentionInputs:
        q = torch.cat([q, q @ layer.key_factors.mT.to(q.dtype)], dim=-1)
        return AttentionInputs(q, *(self._join(states[name], states[f"{name}_factors"]) for name in ("key", "value")))

    def _join(self, shared: Tensor, factors: Tensor) -> Tensor:
        return torch.cat([shared.expand(-1, self.config.num_heads, -1, -1), factors], dim=-1)

    def finalize_heads(self, layer: Layer, heads: Tensor, call: AttentionCall) -> Tensor:
        shared, factors = heads.split([self.config.value_dim, self.factor_rank], dim=-1)
        return shared + factors @ layer.value_factors.to(heads.dtype)

    def expand_values(self, layer: Layer, states: KeyValueStates) -> Tensor:
        factors = states["value_factors"]
        return states["value"] + factors @ layer.value_factors.to(factors.dtype)

    def plain(self, layer: Any) -> Plain:
        def full_weight(name: str) -> Weights:
            weight, bias = own_weights(getattr(layer, f"{name[0]}_proj"), layer.num_heads)
            down = getattr(layer, f"{name[0]}_factor_proj").weight.unflatten(0, (layer.num_heads, -1))
            return weight + (getattr(layer, f"{name}_factors").mT @ down).flatten(0, 1), bias

        return own_weights(layer.q_proj), full_weight("key"), full_weight("value")

    @classmethod
    def full_size(cls, config: LayerSizes) -> int:
        return max(config.head_dim, config.value_dim)

    @classmethod
    def factorize(cls, plain: Any, result: Any) -> None:
        """Set the shared projection to the mean over heads, and factor the difference of each head."""
        copy_weights(plain.q_proj, result.q_proj)
        fold_biases(plain, result)
        for name in ("key", "value"):
            heads = getattr(plain, f"{name[0]}_proj").weight.unflatten(0, (plain.num_heads, -1))
            shared = heads.mean(dim=0)
            getattr(result, f"{name[0]}_proj").weight.copy_(shared)
            left, values, right = torch.linalg.svd(heads - shared, full_matrices=False)
            factors = getattr(result, f"{name}_factors")
            rank, roots = min(factors.size(1), values.size(1)), values.sqrt()
            factors[:, :rank] = (left * roots[:, None])[:, :, :rank].mT
            down = getattr(result, f"{name[0]}_factor_proj").weight.unflatten(0, (plain.num_heads, -1))
            down[:, :rank] = (roots[:, :, None] * right)[:, :rank]


register(
    Method(
        name="lrkv",
        title="Low-rank differences of keys and values",
        formula="K_i = y W_K + y A_i B_i   V_i = y W_V + y A'_i B'_i,   A_i: d × r, B_i: r × d_k",
        parts={"projection": LowRankKeyValue},
        parameters="2·d·d_k + 2·d·h·r + 2·h·r·d_k + 2·d·h·d_k",
        cached="2·d_k + 2·h·r",
        kind="restricted",
        papers=(Paper("Low-rank key value attention", "O'Neill et al. 2026", "https://arxiv.org/abs/2601.11471"),),
        examples=({"factor_rank": 2},),
        colour="#66c2a5",
    )
)
