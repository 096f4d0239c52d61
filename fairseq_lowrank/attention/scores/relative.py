"""Scores of content and of relative position."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_lowrank.attention.projections.projection import Memory, Projection, split_heads
from fairseq_lowrank.attention.scores.score import Score, Setting
from fairseq_lowrank.ops import AttentionMask, Relative


class RelativePositions(Score):
    """((q_t + u) k_sᵀ + (q_t + v) (W_r R_δ)ᵀ) / √d_k with δ = t − s (Transformer-XL, Dai et al. 2019, arXiv 1901.02860).

    R_δ is sinusoidal, W_r (``pos_proj``) projects it to as many heads as there are of keys, u and v (``pos_bias_u``,
    ``pos_bias_v``) are a vector a head. What tells the heads' keys apart (a key embedding) is folded into q_t + u alone. Mixing
    reads q_t. Positions are distances: memory before a segment, cached keys and padding on the left move nothing.

    Attributes:
        dropout: probability of zeroing a number of R in training (0).
        longest: greater distances count as this one; none where it is negative (−1).
    """

    name = "relative"
    dropout = 0.0
    longest = -1

    def __init__(self, projection: Projection, setting: Setting) -> None:
        super().__init__(projection, setting)
        if setting.cross:
            raise ValueError(
                "score 'relative' needs queries and keys of one sequence, which cross attention has not: choose it for "
                "self-attention alone (--attention-sites encoder,decoder)"
            )
        if setting.appended:
            raise ValueError("score 'relative': appended keys (add_bias_kv, add_zero_attn) stand at no position")
        if projection.name == "el":
            raise ValueError(
                "score 'relative' projects positions as keys are projected, and projection 'el' projects no keys: expected "
                "another projection"
            )

    def make_further(self, layer: nn.Module, linear: Callable[..., nn.Module]) -> None:
        sizes = self.projection.sizes
        # A bias would add the same to all scores of a query.
        layer.pos_proj = linear(sizes.embed_dim, self.projection.memory_heads * sizes.head_dim, bias=False)
        nn.init.xavier_uniform_(layer.pos_proj.weight)
        for name in ("pos_bias_u", "pos_bias_v"):
            bias = nn.Parameter(torch.empty(sizes.num_heads, sizes.head_dim))
            nn.init.normal_(bias, std=0.02)  # as in the authors' code
            layer.register_parameter(name, bias)

    def attend_to(
        self, layer: nn.Module, q: Tensor, memory: Memory, mask: AttentionMask, **needs: bool
    ) -> tuple[Relative, Tensor]:
        content, positional = (q + bias[:, None].to(q.dtype) for bias in (layer.pos_bias_u, layer.pos_bias_v))
        scores, values = super().attend_to(layer, content, memory, mask, **needs)
        *_, queries, keys = scores.shape
        count = keys if mask.causal else keys + queries - 1
        return Relative(scores, positional, self._positions(layer, keys, count, q.dtype)), values

    def _positions(self, layer: nn.Module, keys: int, count: int, dtype: torch.dtype) -> Tensor:
        """W_r R of the distances keys − 1, keys − 2, …, ``[1, G, count, head_dim]``."""
        exact = torch.promote_types(dtype, torch.float32)
        distances = torch.arange(keys - 1, keys - 1 - count, -1, device=layer.pos_bias_u.device, dtype=exact)
        if self.longest >= 0:
            distances = distances.clamp(max=float(self.longest))
        table = sinusoids(distances, self.projection.sizes.embed_dim).to(dtype)
        table = F.dropout(table, self.dropout, layer.training)
        return split_heads(layer.pos_proj(table[:, None]), self.projection.sizes.head_dim)


def sinusoids(distances: Tensor, size: int) -> Tensor:
    """sin(δ / 10000^(2i / size)) for all i, then cos: ``[N]`` distances to ``[N, size]``, of one dtype."""
    frequencies = 10000 ** (-torch.arange(0, size, 2, device=distances.device, dtype=distances.dtype) / size)
    angles = distances[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)[:, :size]
