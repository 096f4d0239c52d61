"""Scores of content and of relative position."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_lowrank.methods.standard import CACHED, PARAMETERS
from fairseq_lowrank.ops import AttentionMask, DotProduct, Relative, Scores
from fairseq_lowrank.parts import Method, Paper, register
from fairseq_lowrank.parts.projection import KeyValueStates, Layer, Projection, split_heads
from fairseq_lowrank.parts.score import ScoreFunction


class RelativePositions(ScoreFunction):
    """((q_t + u) k_sᵀ + (q_t + v) (W_r R_δ)ᵀ) / √d_k with δ = t − s (Transformer-XL, Dai et al. 2019, arXiv 1901.02860).

    R_δ is sinusoidal. W_r (``pos_proj``) projects it to as many heads as there are of keys. u and v (``pos_bias_u``,
    ``pos_bias_v``) are a vector for each head. A key embedding is folded into q_t + u alone. Mixing reads q_t. Positions are
    distances: memory before a segment, cached keys and padding on the left change nothing.

    Attributes:
        dropout: probability of zeroing a number of R in training (0).
        max_distance: greater distances count as this one; none if it is negative (−1).
    """

    name = "relative"
    positions_reason = "it has relative positions already"

    def __init__(self, projection: Projection) -> None:
        super().__init__(projection)
        self.limit_positions()
        if projection.config.encoder_decoder_attention:
            raise ValueError(
                "score 'relative' needs queries and keys of one sequence, which cross attention does not have. Use it for "
                "self-attention only (--attention-sites encoder,decoder)."
            )
        if projection.config.has_appended_keys:
            raise ValueError(
                "score 'relative' does not work with add_bias_kv or add_zero_attn: an appended key has no position. Remove them."
            )
        if not projection.projects_keys:
            raise ValueError(
                f"score 'relative' projects positions like keys, and projection {projection.name!r} projects no keys. Choose another "
                "projection."
            )

    def limit_positions(self, dropout: float = 0.0, max_distance: int = -1) -> None:
        """Set the attributes of the class, as the Transformer-XL does with its ``--dropout`` and ``--clamp-length``."""
        self.dropout, self.max_distance = dropout, max_distance

    def build_extra_parameters(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | nn.Parameter]:
        config = self.projection.config
        # A bias would add the same to all scores of a query.
        pos_proj = linear(config.embed_dim, self.projection.state_heads * config.head_dim, bias=False)
        biases = {
            name: nn.Parameter(torch.empty(config.num_heads, config.head_dim)) for name in ("pos_bias_u", "pos_bias_v")
        }
        return {"pos_proj": pos_proj, **biases}

    def reset_parameters(self, layer: Layer) -> None:
        nn.init.xavier_uniform_(layer.pos_proj.weight)
        for bias in (layer.pos_bias_u, layer.pos_bias_v):
            nn.init.normal_(bias, std=0.02)  # as in the authors' code

    def attention_inputs(
        self,
        layer: Layer,
        q: Tensor,
        states: KeyValueStates,
        mask: AttentionMask,
        *,
        training: bool,
        keep_row_constants: bool,
        rows_sum_to_one: bool,
    ) -> tuple[Scores, Tensor]:
        u, v = (bias[:, None].to(q.dtype) for bias in (layer.pos_bias_u, layer.pos_bias_v))
        scores, values = super().attention_inputs(
            layer,
            q + u,
            states,
            mask,
            training=training,
            keep_row_constants=keep_row_constants,
            rows_sum_to_one=rows_sum_to_one,
        )
        assert isinstance(scores, DotProduct)
        *_, queries, keys = scores.shape
        count = keys if mask.sees_no_later_key else max(keys + queries - 1, keys)
        return Relative(scores, q + v, self._positions(layer, keys, count, q.dtype, training)), values

    def _positions(self, layer: Layer, keys: int, count: int, dtype: torch.dtype, training: bool) -> Tensor:
        """Return W_r R of the distances keys − 1, keys − 2, …, ``[1, G, count, head_dim]``."""
        exact = torch.promote_types(dtype, torch.float32)
        distances = torch.arange(keys - 1, keys - 1 - count, -1, device=layer.pos_bias_u.device, dtype=exact)
        if self.max_distance >= 0:
            distances = distances.clamp(max=float(self.max_distance))
        config = self.projection.config
        table = sinusoids(distances, config.embed_dim).to(dtype)
        table = F.dropout(table, self.dropout, training)
        return split_heads(layer.pos_proj(table[:, None]), config.head_dim)


def sinusoids(distances: Tensor, size: int) -> Tensor:
    """Return sin(δ / 10000^(2i / size)) for all i, then cos: ``[N]`` distances to ``[N, size]``, of one dtype."""
    frequencies = 10000 ** (-torch.arange(0, size, 2, device=distances.device, dtype=distances.dtype) / size)
    angles = distances[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)[:, :size]


register(
    Method(
        name="relative",
        title="Transformer-XL's scores: content and relative position",
        formula="S_i[t, s] = ((q_t + u_i)·k_s + (q_t + v_i)·r_{t−s}) / √d_k,   r_δ = W_R,i R_δ with R_δ sinusoidal, u_i and v_i learned",
        parts={"score": RelativePositions},
        parameters=f"{PARAMETERS} + d·h·d_k + 2·h·d_k",
        cached=CACHED,
        papers=(
            Paper(
                "Transformer-XL: attentive language models beyond a fixed-length context",
                "Dai et al. 2019",
                "https://arxiv.org/abs/1901.02860",
            ),
        ),
        preset=False,
    )
)
