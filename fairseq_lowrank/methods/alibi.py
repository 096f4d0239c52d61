"""ALiBi: scores less a fixed multiple of the distance of query and key."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_lowrank.methods.standard import CACHED, PARAMETERS
from fairseq_lowrank.parts import DistanceBias, Method, Paper, register


class LinearBiases(DistanceBias):
    """S_i[t, s] − m_i |t − s| with the slopes m_i = 2^(−8 i / h), i = 1 … h, for h a power of two. It has no parameters.

    Source: ALiBi (Press et al. 2022, arXiv 2108.12409) and its code ``attention_with_linear_biases``: for other h, the slopes of
    the next smaller power of two c come first, and then every second slope of 2 c, from the first. In bidirectional attention
    both sides have the same biases. Self-attention only.
    """

    name = "alibi"
    learns = False

    @property
    def keeps_stock(self) -> bool:
        return False

    def slopes(self, device: torch.device) -> Tensor:
        """Return the slopes ``[H]`` in float32."""
        power = 1 << (self.num_heads.bit_length() - 1)
        first = torch.arange(1, power + 1, device=device, dtype=torch.float32)
        further = torch.arange(self.num_heads - power, device=device, dtype=torch.float32) + 0.5
        return torch.exp2(torch.cat([first, further]) * (-8 / power))

    def bias(self, distances: Tensor) -> Tensor:
        return -self.slopes(distances.device)[:, None] * distances.abs()[:, None]


register(
    Method(
        name="alibi",
        title="ALiBi: attention with linear biases",
        formula="P_i = softmax(Q_i K_iᵀ / √d_k − m_i |t − s|),   m_i = 2^(−8 i / h) for i = 1 … h",
        parts={"score_bias": LinearBiases},
        parameters=PARAMETERS,
        cached=CACHED,
        kind="QK",
        papers=(
            Paper(
                "Train short, test long: attention with linear biases enables input length extrapolation",
                "Press et al. 2022",
                "https://arxiv.org/abs/2108.12409",
            ),
        ),
        colour="#5f9e6e",
    )
)
