"""Hidden states as keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_lowrank.methods.multi_query import MHE
from fairseq_lowrank.methods.shared_kv import SharedKeyValue
from fairseq_lowrank.parts import AttentionConfig, Method, Paper, register
from fairseq_lowrank.parts.plain import Plain, own_weights
from fairseq_lowrank.parts.projection import Layer


class ELProjection(SharedKeyValue):
    """A separate W_q for each head; keys and values are the hidden states, cut into heads.

    Source: EL-attention (Yan et al. 2021, arXiv 2105.04779), as the MHE poster uses it.
    """

    name = "el"
    groups = ()
    projects_keys = False

    def __init__(self, config: AttentionConfig) -> None:
        embed_dim, num_heads, head_dim = config.embed_dim, config.num_heads, config.head_dim
        if config.kdim != embed_dim:
            raise ValueError(
                f"kdim={config.kdim}: projection {self.name!r} uses the hidden states as keys. Set kdim = embed_dim = {embed_dim}."
            )
        if head_dim * num_heads != embed_dim:
            raise ValueError(
                f"head_dim={head_dim}: projection {self.name!r} cuts the hidden states into heads. Set head_dim = embed_dim / "
                f"num_heads = {embed_dim / num_heads:g}."
            )
        super().__init__(config)

    def build_projections(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | None]:
        return {"k_proj": None, "v_proj": None, "q_proj": linear(self.config.embed_dim, self.config.embed_dim)}

    def project_key(self, layer: Layer, key: Tensor) -> Tensor:
        return key

    def plain(self, layer: Any) -> Plain:
        states = torch.eye(layer.embed_dim).to(layer.q_proj.weight), None
        return own_weights(layer.q_proj), states, states


register(
    Method(
        name="el",
        title="EL-attention",
        formula="Q_i = x W_Q,i   K_i = V_i = y[:, i·d_k : (i + 1)·d_k]   O_i = softmax(Q_i K_iᵀ / √d_k) K_i",
        parts={"projection": ELProjection},
        parameters="2·d·h·d_k",
        cached="h·d_k",
        kind="restricted",
        papers=(
            Paper(
                "EL-Attention: memory efficient lossless attention for generation",
                "Yan et al. 2021",
                "https://arxiv.org/abs/2105.04779",
            ),
            MHE,
        ),
        colour="#904878",
    )
)
