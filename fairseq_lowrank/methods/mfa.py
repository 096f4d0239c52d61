"""Multi-matrix factorization attention: many wide queries through a small latent, one key and one value for all heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fairseq_lowrank.methods.multi_query import MultiQuery
from fairseq_lowrank.parts import AttentionConfig, Method, Paper, register
from fairseq_lowrank.parts.part import Option
from fairseq_lowrank.parts.plain import Plain, own_weights
from fairseq_lowrank.parts.projection import Layer, split_heads


class FactorizedQuery(MultiQuery):
    """q_i = (x C) U_i of size D with C: d×r; one key and one value of size D for all heads.

    Source: MFA (Hu et al. 2024, arXiv 2412.19255, equations 5 to 7). D is the head size (``head_dim``), r is ``latent_dim``, by
    default d. A token caches 2·D numbers.
    """

    name = "factorized-query"
    groups = ()
    needs_keys = True
    options = (Option("latent_dim", "size of the latent vector of queries (default: the embedding size)", letter="r"),)

    def __init__(self, config: AttentionConfig, latent_dim: int | None = None) -> None:
        super().__init__(config)
        self.latent_dim = latent_dim or config.embed_dim

    def score_rank(self, *, mixed: bool) -> int:
        # the bias of the queries is one more direction
        return min(super().score_rank(mixed=mixed), self.latent_dim + 1)

    def build_projections(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | None]:
        config = self.config
        return {
            "k_proj": linear(config.kdim, config.head_dim),
            "v_proj": linear(config.vdim, config.value_dim),
            "q_latent_proj": linear(config.embed_dim, self.latent_dim, bias=False),
            "q_proj": linear(self.latent_dim, config.num_heads * config.head_dim),
        }

    def project_query(self, layer: Layer, query: Tensor) -> Tensor:
        return split_heads(layer.q_proj(layer.q_latent_proj(query)), self.config.head_dim)

    def plain(self, layer: Any) -> Plain:
        queries = layer.q_proj.weight @ layer.q_latent_proj.weight, layer.q_proj.bias
        return queries, own_weights(layer.k_proj, layer.num_heads), own_weights(layer.v_proj, layer.num_heads)


def _class_of(layer: Any) -> str:
    config = layer.config
    return "QK" if config.head_dim * config.num_heads > config.embed_dim else "restricted"


register(
    Method(
        name="mfa",
        title="Multi-matrix factorization attention: wide queries through a latent",
        formula="Q_i = (x C) U_i   K = y W_K   V = y W_V   O_i = softmax(Q_i Kᵀ / √d_k) V,   C: d × r, U_i: r × d_k",
        parts={"projection": FactorizedQuery},
        parameters="d·r + r·h·d_k + 2·d·d_k + h·d_k·d",
        cached="2·d_k",
        kind="QK",
        kind_of=_class_of,
        papers=(Paper("Multi-matrix factorization attention", "Hu et al. 2024", "https://arxiv.org/abs/2412.19255"),),
        examples=({"latent_dim": 5, "head_dim": 6},),
        colour="#5a3e2b",
    )
)
