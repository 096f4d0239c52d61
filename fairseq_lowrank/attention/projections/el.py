"""Hidden states as keys and values."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fairseq_lowrank.attention.projections.projection import Sizes
from fairseq_lowrank.attention.projections.shared_kv import SharedKeyValue


class EL(SharedKeyValue):
    """Own W_q for each head; keys and values are the hidden states, cut into heads (EL-attention, Yan et al. 2021, arXiv
    2105.04779, as the MHE poster takes it)."""

    name = "el"
    groups = ()

    def __init__(self, sizes: Sizes) -> None:
        embed_dim, num_heads, head_dim = sizes[:3]
        if sizes.kdim != embed_dim:
            raise ValueError(
                f"projection {self.name!r} uses the hidden states as keys and needs kdim = embed_dim: "
                f"kdim={sizes.kdim}, embed_dim={embed_dim}"
            )
        if head_dim * num_heads != embed_dim:
            raise ValueError(
                f"projection {self.name!r} cuts the hidden states into heads and needs head_dim = embed_dim / num_heads = "
                f"{embed_dim / num_heads:g}: head_dim={head_dim}"
            )
        super().__init__(sizes)

    def make(self, layer: nn.Module, linear: Callable[..., nn.Module]) -> None:
        layer.k_proj = layer.v_proj = None
        layer.q_proj = linear(self.sizes.embed_dim, self.sizes.embed_dim)

    def project_key(self, layer: nn.Module, key: Tensor) -> Tensor:
        return key
