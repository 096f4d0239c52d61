"""Scores without keys: made of the query alone, or of nothing but positions (Synthesizer, Tay et al. 2020, arXiv 2005.00743)."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_lowrank.attention.masks import is_right_padding
from fairseq_lowrank.attention.projections.projection import Memory, Projection, split_heads
from fairseq_lowrank.attention.scores.score import Score, Setting
from fairseq_lowrank.ops import AttentionMask, DotProduct, RandomSynthesizer, Scores

PROJECTIONS = ("independent", "multi-query", "single")


class Synthesizer(Score):
    """What both have in common: a greatest length, no keys, and values alone to remember.

    Positions count the tokens of a sentence: padding on its left, as fairseq's translation has it, moves nothing.
    """

    def __init__(self, projection: Projection, setting: Setting) -> None:
        super().__init__(projection, setting)
        if setting.cross:
            raise ValueError(
                f"score {self.name!r} gives positions of one sentence their scores, and cross attention has two: choose it for "
                "self-attention alone (--attention-sites encoder,decoder)"
            )
        if setting.appended:
            raise ValueError(f"score {self.name!r}: appended keys (add_bias_kv, add_zero_attn) stand at no position")
        if projection.name not in PROJECTIONS:
            raise ValueError(
                f"score {self.name!r} has no keys, of which projection {projection.name!r} makes something: expected one of "
                f"{', '.join(PROJECTIONS)}"
            )
        positions = setting.max_positions
        if positions is None:
            raise ValueError(
                f"score {self.name!r} has a number of its own for each position: give their number (max_positions=N)"
            )
        if not isinstance(positions, Integral) or isinstance(positions, bool) or positions < 1:
            raise ValueError(f"max_positions={positions!r}: expected a positive integer")
        self.max_positions = positions
        self.memory_sizes = {"value": projection.sizes.value_dim}

    @property
    def meaning(self) -> dict[str, int]:
        return {"max_positions": self.max_positions}

    def make(self, layer: nn.Module, linear: Callable[..., nn.Module]) -> None:
        super().make(layer, linear)
        layer.k_proj = None

    def project_memory(self, layer: nn.Module, key: Tensor, value: Tensor) -> Memory:
        return {name: split_heads(layer.v_proj(value), size) for name, size in self.memory_sizes.items()}

    def attend_to(
        self, layer: nn.Module, q: Tensor, memory: Memory, mask: AttentionMask, **needs: bool
    ) -> tuple[Scores, Tensor]:
        values = memory["value"]
        queries, keys = q.size(2), values.size(2)
        if keys > self.max_positions:
            raise ValueError(
                f"a sentence of {keys} positions, and score {self.name!r} was built for up to {self.max_positions} "
                "(--max-target-positions, --max-source-positions, max_positions)"
            )
        if queries > keys:
            raise ValueError(f"{queries} queries of {keys} keys: score {self.name!r} needs both of one sentence")
        padding, positions = mask.key_padding, None
        if padding is not None and not is_right_padding(padding):
            positions = (~padding).cumsum(dim=1).sub(1).clamp(min=0)
        return self.scores(layer, q, values, positions), values

    def scores(self, layer: nn.Module, q: Tensor, values: Tensor, positions: Tensor | None) -> Scores:
        """Those of the queries, which are the last of the keys.

        Args:
            values: ``[B, G, S, D]``
            positions: ``[B, S]`` of the keys; ``None`` where they are 0, 1, 2, ….
        """
        raise NotImplementedError


class DenseScores(Synthesizer):
    """S_i[t] = ReLU(x_t W_1,i + b_1,i) W_2 + b_2: ``q_proj`` is the first layer, and of the second one (``synthesizer``) each key
    position has a column, which is to the hidden features what a key is to a query.

    Each head has its own second layer, or g of them are shared by h/g heads each. Mixing reads the hidden features.
    """

    name = "synthesizer-dense"

    def __init__(self, projection: Projection, setting: Setting) -> None:
        super().__init__(projection, setting)
        self.heads = setting.synthesizer_heads or projection.sizes.num_heads
        if projection.sizes.num_heads % self.heads:
            raise ValueError(
                f"synthesizer_heads={self.heads}: expected a divisor of num_heads={projection.sizes.num_heads}"
            )
        self.unused_key_projection = setting.unused_key_projection

    @property
    def numbers(self) -> int:
        return self.heads * self.projection.sizes.head_dim * self.max_positions

    @property
    def meaning(self) -> dict[str, int]:
        return {**super().meaning, "synthesizer_heads": self.heads}

    def make(self, layer: nn.Module, linear: Callable[..., nn.Module]) -> None:
        if self.unused_key_projection:
            Score.make(self, layer, linear)
        else:
            super().make(layer, linear)

    def make_further(self, layer: nn.Module, linear: Callable[..., nn.Module]) -> None:
        layer.synthesizer = linear(self.projection.sizes.head_dim, self.heads * self.max_positions)
        for weight in layer.synthesizer.weight.data.chunk(self.heads):
            nn.init.xavier_uniform_(weight)
        if layer.synthesizer.bias is not None:
            nn.init.zeros_(layer.synthesizer.bias)

    def project_query(self, layer: nn.Module, query: Tensor) -> Tensor:
        return F.relu(super().project_query(layer, query))

    def scores(self, layer: nn.Module, q: Tensor, values: Tensor, positions: Tensor | None) -> DotProduct:
        keys = values.size(2)
        if layer.training:  # hooks, of which quantisation noise is one, are of calls
            layer.synthesizer(layer.synthesizer.weight.new_empty(0, self.projection.sizes.head_dim))
        weight, bias = layer.synthesizer.weight, layer.synthesizer.bias
        if self.unused_key_projection:
            # Distributed training waits for the gradient of every parameter: these get zeros.
            weight = weight + sum(parameter[:0].sum() for parameter in layer.k_proj.parameters())
        table = weight.unflatten(0, (self.heads, -1)).to(q.dtype)
        if bias is not None:
            # The bias of a position is a further feature of its column, which meets a 1.
            table = torch.cat((table, bias.view(self.heads, -1, 1).to(q.dtype)), dim=-1)
            q = torch.cat((q, q.new_ones(*q.shape[:3], 1)), dim=-1)
        if self.heads > 1:
            q = q.expand(-1, self.projection.sizes.num_heads, -1, -1)
        if positions is None:
            columns = table[:, :keys].expand(len(values), -1, -1, -1)
        else:
            columns = F.embedding(positions, table.transpose(0, 1).flatten(1))
            columns = columns.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return DotProduct(q, columns, 1.0)


class RandomScores(Synthesizer):
    """S_i[t, s] = R_i[t, s]: a learned matrix for each head (``synthesizer``), neither query nor key. It starts normal, of
    variance 1/n for n positions."""

    name = "synthesizer-random"

    @property
    def numbers(self) -> int:
        return self.projection.sizes.num_heads * self.max_positions**2

    def make(self, layer: nn.Module, linear: Callable[..., nn.Module]) -> None:
        super().make(layer, linear)
        layer.q_proj = None

    def make_further(self, layer: nn.Module, linear: Callable[..., nn.Module]) -> None:
        layer.synthesizer = PairsOfPositions(self.projection.sizes.num_heads, self.max_positions)

    def project_query(self, layer: nn.Module, query: Tensor) -> Tensor:
        queries, batch, _ = query.shape
        return query.new_empty(batch, self.projection.sizes.num_heads, queries, 0)

    def scores(self, layer: nn.Module, q: Tensor, values: Tensor, positions: Tensor | None) -> RandomSynthesizer:
        weight, keys = layer.synthesizer.weight, values.size(2)
        first = keys - q.size(2)
        if positions is None:
            return RandomSynthesizer(weight[:, first:keys, :keys], len(values))
        weight = weight[:, positions[:, first:, None], positions[:, None, :]]
        return RandomSynthesizer(weight.transpose(0, 1), len(values))


class PairsOfPositions(nn.Module):
    """R ``[H, n, n]``."""

    def __init__(self, heads: int, positions: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, positions, positions))
        nn.init.normal_(self.weight, std=positions**-0.5)

    def extra_repr(self) -> str:
        heads, positions, _ = self.weight.shape
        return f"{heads} heads, {positions} positions"
