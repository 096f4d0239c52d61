"""Multi-matrix factorization attention: many wide queries through a small latent, one key and one value for all heads."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fairseq_lowrank.methods.multi_query import MultiQuery
from fairseq_lowrank.parts.projection import AttentionDims, Modules, split_heads


class FactorizedQuery(MultiQuery):
    """q_i = (x C) U_i of size D with C: d×r; one key and one value of size D for all heads.

    Source: MFA (Hu et al. 2024, arXiv 2412.19255, equations 5 to 7). D is the head size (``head_dim``), r is ``latent_dim``, by
    default d. A token caches 2·D numbers.
    """

    name = "factorized-query"
    groups = ()
    sizes = ("latent_dim",)

    def __init__(self, dims: AttentionDims) -> None:
        super().__init__(dims)
        self.rank = dims.latent_dim or dims.embed_dim

    def build_projections(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | None]:
        dims = self.dims
        return {
            "k_proj": linear(dims.kdim, dims.head_dim),
            "v_proj": linear(dims.vdim, dims.value_dim),
            "q_latent_proj": linear(dims.embed_dim, self.rank, bias=False),
            "q_proj": linear(self.rank, dims.num_heads * dims.head_dim),
        }

    def project_query(self, modules: Modules, query: Tensor) -> Tensor:
        return split_heads(modules["q_proj"](modules["q_latent_proj"](query)), self.dims.head_dim)
