"""Collaborative heads: one projection of queries and one of keys, whose features each head weighs differently."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fairseq_lowrank.parts.projection import AttentionDims, Modules, Projection, split_heads


class CollaborativeProjection(Projection):
    """S_i = (x W_Q) diag(m_i) (y W_K)ᵀ with W_Q, W_K: d×D shared by all heads; values are each head's own.

    Source: Cordonnier et al. 2020 (arXiv 2006.16362, equation 7); details from ``jbcdnr/fairseq-collaborative-heads``. A token
    caches D + h·d_v numbers. m_i starts with ones in the i-th of h blocks of features and zeros elsewhere, so that each head
    starts with the features of one block. With D = h·d_k every plain attention is one of these.
    """

    name = "collaborative"
    keys_reason = "its heads weigh the features of one shared query and key, and its keys are no head's own"
    groups = ()
    composes = False
    sizes = ("shared_dim",)

    def __init__(self, dims: AttentionDims) -> None:
        super().__init__(dims)
        self.shared_dim = dims.shared_dim or dims.num_heads * dims.head_dim
        self.query_heads = 1
        self.query_size = self.shared_dim
        self.state_sizes = {"key": self.shared_dim, "value": dims.value_dim}
        self.state_groups = {"key": 1, "value": dims.num_heads}

    def build_projections(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | None]:
        dims = self.dims
        return {
            "k_proj": linear(dims.kdim, self.shared_dim),
            "v_proj": linear(dims.vdim, dims.num_heads * dims.value_dim),
            "q_proj": linear(dims.embed_dim, self.shared_dim),
        }

    def build_extra_parameters(self) -> dict[str, nn.Module | nn.Parameter]:
        heads, size = self.dims.num_heads, -(-self.shared_dim // self.dims.num_heads)
        blocks = torch.eye(heads).repeat_interleave(size, dim=1)[:, : self.shared_dim]
        return {"head_features": nn.Parameter(blocks.clone())}

    def project_query(self, modules: Modules, query: Tensor) -> Tensor:
        shared = split_heads(modules["q_proj"](query), self.shared_dim)
        return shared * modules["head_features"][:, None]

    def project_key_value(self, modules: Modules, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        return {
            "key": split_heads(modules["k_proj"](key), self.shared_dim),
            "value": split_heads(modules["v_proj"](value), self.dims.value_dim),
        }
