"""Collaborative heads: one projection of queries and one of keys, whose features each head weighs differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_lowrank.parts import AttentionConfig, Method, Paper, register
from fairseq_lowrank.parts.parameters import assign
from fairseq_lowrank.parts.part import Option
from fairseq_lowrank.parts.plain import Plain, copy_weights, own_weights
from fairseq_lowrank.parts.projection import Layer, Projection, split_heads
from fairseq_lowrank.parts.sizes import LayerSizes


class CollaborativeProjection(Projection):
    """S_i = (x W_Q) diag(m_i) (y W_K)ᵀ with W_Q, W_K: d×D shared by all heads; values are each head's own.

    Source: Cordonnier et al. 2020 (arXiv 2006.16362, equation 7); details from ``jbcdnr/fairseq-collaborative-heads``. A token
    caches D + h·d_v numbers. m_i starts with ones in the i-th of h blocks of features and zeros elsewhere, so that each head
    starts with the features of one block. With D = h·d_k every plain attention is one of these.
    """

    name = "collaborative"
    keys_reason = "its heads weigh the features of one shared query and key, and its keys are no head's own"
    groups = ()
    factor = "shared_dim"
    composes = False
    options = (
        Option(
            "shared_dim",
            "size D of the queries and keys that heads share (default: heads * head size, plain attention)",
            letter="D",
        ),
    )

    def __init__(self, config: AttentionConfig, shared_dim: int | None = None) -> None:
        super().__init__(config)
        self.shared_dim = shared_dim or config.num_heads * config.head_dim
        self.query_heads = 1
        self.query_size = self.shared_dim
        self.state_sizes = {"key": self.shared_dim, "value": config.value_dim}
        self.state_groups = {"key": 1, "value": config.num_heads}

    def build_projections(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | None]:
        config = self.config
        return {
            "k_proj": linear(config.kdim, self.shared_dim),
            "v_proj": linear(config.vdim, config.num_heads * config.value_dim),
            "q_proj": linear(config.embed_dim, self.shared_dim),
        }

    def build_extra_parameters(self) -> dict[str, nn.Module | nn.Parameter]:
        return {"head_features": nn.Parameter(torch.empty(self.config.num_heads, self.shared_dim))}

    @torch.no_grad()
    def reset_parameters(self, layer: Layer) -> None:
        heads, size = self.config.num_heads, -(-self.shared_dim // self.config.num_heads)
        blocks = torch.eye(heads).repeat_interleave(size, dim=1)[:, : self.shared_dim]
        assign(layer.head_features, blocks)

    def project_query(self, layer: Layer, query: Tensor) -> Tensor:
        shared = split_heads(layer.q_proj(query), self.shared_dim)
        return shared * layer.head_features[:, None]

    def project_key_value(self, layer: Layer, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        return {
            "key": split_heads(layer.k_proj(key), self.shared_dim),
            "value": split_heads(layer.v_proj(value), self.config.value_dim),
        }

    def plain(self, layer: Any) -> Plain:
        weight, bias = own_weights(layer.q_proj, layer.num_heads)
        features = layer.head_features.flatten()
        queries = weight * features[:, None], None if bias is None else bias * features
        return queries, own_weights(layer.k_proj, layer.num_heads), own_weights(layer.v_proj)

    @classmethod
    def full_size(cls, config: LayerSizes) -> int:
        return config.num_heads * config.head_dim

    @classmethod
    def factorize(cls, plain: Any, result: Any) -> None:
        """Keep the D largest singular values of all heads' bilinear forms, each as a feature of its head."""
        copy_weights(plain.v_proj, result.v_proj)
        queries, keys = (_with_bias(projection, plain.num_heads) for projection in (plain.q_proj, plain.k_proj))
        (basis_q, small_q), (basis_k, small_k) = (torch.linalg.qr(weight.mT) for weight in (queries, keys))
        left, values, right = torch.linalg.svd(small_q @ small_k.mT, full_matrices=False)
        head = torch.arange(plain.num_heads)[:, None].expand_as(values).flatten()
        roots = values.sqrt()[:, :, None]
        query_rows = (roots * (basis_q @ left).mT).flatten(0, 1)
        key_rows = (roots * (right @ basis_k.mT)).flatten(0, 1)
        kept = values.flatten().argsort(descending=True)[: result.q_proj.weight.size(0)]
        for projection, rows in ((result.q_proj, query_rows[kept]), (result.k_proj, key_rows[kept])):
            projection.weight[: len(kept)] = rows[:, : projection.weight.size(1)]
            if projection.bias is not None and plain.q_proj.bias is not None:
                projection.bias[: len(kept)] = rows[:, -1]
        result.head_features[head[kept], torch.arange(len(kept))] = 1.0


def _with_bias(projection: Any, heads: int) -> Tensor:
    """Return ``[H, D, inputs (+ 1)]``, with the bias as the weight of an input that is 1."""
    weight = (
        projection.weight if projection.bias is None else torch.cat([projection.weight, projection.bias[:, None]], 1)
    )
    return weight.unflatten(0, (heads, -1))


def _class_of(layer: Any) -> str:
    return "restricted" if layer.projection.shared_dim <= layer.config.head_dim else "QK"


register(
    Method(
        name="collaborative",
        title="Collaborative heads: shared queries and keys, weighted by each head",
        formula="S_i = (x W_Q) diag(m_i) (y W_K)ᵀ / √d_k   V_i = y W_V,i,   W_Q and W_K: d × D, m_i from ones in block i",
        parts={"projection": CollaborativeProjection},
        parameters="2·d·D + h·D + 2·d·h·d_k",
        cached="D + h·d_k",
        kind="QK",
        kind_of=_class_of,
        papers=(
            Paper(
                "Multi-head attention: collaborate instead of concatenate",
                "Cordonnier et al. 2020",
                "https://arxiv.org/abs/2006.16362",
            ),
        ),
        examples=({"shared_dim": 7},),
        colour="#a6761d",
    )
)
