"""Scores without keys, from the query alone or from positions alone (Synthesizer, Tay et al. 2020, arXiv 2005.00743)."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_lowrank.methods.mixhead import MIXHEAD
from fairseq_lowrank.ops import AttentionMask, DotProduct, RandomSynthesizer, Scores
from fairseq_lowrank.ops.attention.padding import is_right_padding
from fairseq_lowrank.parts import Method, Paper, register
from fairseq_lowrank.parts.parameters import assign
from fairseq_lowrank.parts.part import Option
from fairseq_lowrank.parts.projection import KeyValueStates, Layer, Projection, linear_map, split_heads
from fairseq_lowrank.parts.score import ScoreFunction

SYNTHESIZER = Paper(
    "Synthesizer: rethinking self-attention for Transformer models",
    "Tay et al. 2020",
    "https://arxiv.org/abs/2005.00743",
)


class Synthesizer(ScoreFunction):
    """The base of both synthesizers: they have a greatest length and no keys, and cache values alone.

    Positions count the tokens of a sentence. Padding on its left, as in fairseq's translation, changes nothing.
    """

    keys_reason = "it has no keys"

    def __init__(self, projection: Projection) -> None:
        super().__init__(projection)
        if projection.config.encoder_decoder_attention:
            raise ValueError(
                f"score {self.name!r} scores positions of one sentence, and cross attention has two. Use it for "
                "self-attention only (--attention-sites encoder,decoder)."
            )
        if projection.config.has_appended_keys:
            raise ValueError(
                f"score {self.name!r} does not work with add_bias_kv or add_zero_attn: an appended key has no position. "
                "Remove them."
            )
        if projection.needs_keys:
            raise ValueError(
                f"projection {projection.name!r} needs keys, and score {self.name!r} has none. Use projection 'independent'."
            )
        positions = projection.config.max_positions
        if positions is None:
            raise ValueError(
                f"score {self.name!r} learns parameters for every position. Pass the greatest length: max_positions=N."
            )
        if not isinstance(positions, Integral) or isinstance(positions, bool) or positions < 1:
            raise ValueError(f"max_positions={positions!r}: expected a positive integer")
        self.max_positions: int = int(positions)
        self.state_sizes = {"value": projection.config.value_dim}

    @property
    def state_config(self) -> dict[str, int]:
        return {"max_positions": self.max_positions}

    def build_projections(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | None]:
        return {**super().build_projections(linear), "k_proj": None}

    def project_key_value(self, layer: Layer, key: Tensor, value: Tensor) -> KeyValueStates:
        return {name: split_heads(layer.v_proj(value), size) for name, size in self.state_sizes.items()}

    def attention_inputs(
        self,
        layer: Layer,
        q: Tensor,
        states: KeyValueStates,
        mask: AttentionMask,
        *,
        training: bool,
        **needs: bool,
    ) -> tuple[Scores, Tensor]:
        values = states["value"]
        queries, keys = q.size(2), values.size(2)
        if keys > self.max_positions:
            raise ValueError(
                f"a sentence of {keys} positions, and score {self.name!r} was built for up to {self.max_positions}. Shorten it, or "
                "build the model for more (--max-target-positions, --max-source-positions, max_positions)."
            )
        if queries > keys:
            raise ValueError(f"{queries} queries of {keys} keys: score {self.name!r} expected both of one sentence")
        padding, positions = mask.key_padding, None
        if padding is not None and not is_right_padding(padding):
            positions = (~padding).cumsum(dim=1).sub(1).clamp(min=0)
        return self.scores(layer, q, values, positions, training), values

    def scores(self, layer: Layer, q: Tensor, values: Tensor, positions: Tensor | None, training: bool) -> Scores:
        """Return the scores of the queries, whose positions are the last ones of the keys.

        Args:
            values: ``[B, G, S, D]``
            positions: ``[B, S]`` of the keys; ``None`` if they are 0, 1, 2, ….
        """
        raise NotImplementedError


class DenseScores(Synthesizer):
    """S_i[t] = ReLU(x_t W_1,i + b_1,i) W_2 + b_2: ``q_proj`` is the first layer, and of the second one (``synthesizer``) each key
    position has a column, which is to the hidden features what a key is to a query.

    Each head has its own second layer, or g of them are shared by h/g heads each. Mixing reads the hidden features.
    """

    name = "synthesizer-dense"
    options = (
        Option(
            "synthesizer_heads",
            "number g of second layers, a divisor of the heads; head i uses layer floor(i g / h) (default: one per head; 1 gives the Mixhead "
            "paper's 248M parameters)",
            letter="m",
        ),
        Option(
            "unused_key_projection",
            "add a projection of keys that nothing reads, as in the Mixhead paper's model of 248M parameters",
            default=False,
        ),
    )

    def __init__(
        self, projection: Projection, synthesizer_heads: int | None = None, unused_key_projection: bool = False
    ) -> None:
        super().__init__(projection)
        self.synthesizer_heads = synthesizer_heads or projection.config.num_heads
        if projection.config.num_heads % self.synthesizer_heads:
            raise ValueError(
                f"synthesizer_heads={self.synthesizer_heads}: expected a divisor of num_heads={projection.config.num_heads}"
            )
        self.unused_key_projection = unused_key_projection
        self.unused_modules = ("k_proj",) if unused_key_projection else ()

    @property
    def key_heads(self) -> int:
        return self.synthesizer_heads

    def rank(self, *, mixed: bool) -> int:
        """Return the greatest rank of a head's scores. Features are no linear map of inputs, so the width does not bound them."""
        return (self.key_heads if mixed else 1) * self.projection.config.head_dim

    @property
    def num_parameters(self) -> int:
        return self.synthesizer_heads * self.projection.config.head_dim * self.max_positions

    @property
    def state_config(self) -> dict[str, int]:
        return {**super().state_config, "synthesizer_heads": self.synthesizer_heads}

    def build_projections(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | None]:
        if self.unused_key_projection:
            return ScoreFunction.build_projections(self, linear)
        return super().build_projections(linear)

    def build_extra_parameters(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | nn.Parameter]:
        return {"synthesizer": linear(self.projection.config.head_dim, self.synthesizer_heads * self.max_positions)}

    def reset_parameters(self, layer: Layer) -> None:
        synthesizer = layer.synthesizer
        drawn = torch.empty(synthesizer.weight.shape, dtype=synthesizer.weight.dtype, device=synthesizer.weight.device)
        for weight in drawn.chunk(self.synthesizer_heads):
            nn.init.xavier_uniform_(weight)
        assign(synthesizer.weight, drawn)
        if synthesizer.bias is not None:
            nn.init.zeros_(synthesizer.bias)

    def project_query(self, layer: Layer, query: Tensor) -> Tensor:
        return F.relu(super().project_query(layer, query))

    def scores(self, layer: Layer, q: Tensor, values: Tensor, positions: Tensor | None, training: bool) -> DotProduct:
        keys, synthesizer = values.size(2), layer.synthesizer
        if training:  # an empty call runs the hooks of the module, such as quantisation noise
            synthesizer(synthesizer.weight.new_empty(0, self.projection.config.head_dim))
        weight, bias = synthesizer.weight, synthesizer.bias
        called = synthesizer._forward_hooks or "forward" in vars(synthesizer)  # an offloaded layer has another forward
        if type(synthesizer) is not nn.Linear or called:  # or an adapter, or a quantised layer
            weight, bias = linear_map(synthesizer, self.projection.config.head_dim, q)
        if self.unused_key_projection:
            # Distributed training waits for the gradient of every parameter: these get zeros.
            weight = weight + sum(parameter[:0].sum() for parameter in layer.k_proj.parameters())
        table = weight.unflatten(0, (self.synthesizer_heads, -1)).to(q.dtype)
        if bias is not None:
            # The bias of a position is one more feature of its column; queries have a 1 there.
            table = torch.cat((table, bias.view(self.synthesizer_heads, -1, 1).to(q.dtype)), dim=-1)
            q = torch.cat((q, q.new_ones(*q.shape[:3], 1)), dim=-1)
        if self.synthesizer_heads > 1:
            q = q.expand(-1, self.projection.config.num_heads, -1, -1)
        if positions is None:
            columns = table[:, :keys].expand(len(values), -1, -1, -1)
        else:
            columns = F.embedding(positions, table.transpose(0, 1).flatten(1))
            columns = columns.unflatten(-1, (self.synthesizer_heads, -1)).transpose(1, 2)
        return DotProduct(q, columns, 1.0)


class RandomScores(Synthesizer):
    """S_i[t, s] = R_i[t, s]: a learned matrix for each head (``synthesizer``), neither query nor key. It starts normal, of
    variance 1/n for n positions."""

    name = "synthesizer-random"
    has_queries = False

    @property
    def num_parameters(self) -> int:
        return self.projection.config.num_heads * self.max_positions**2

    def build_projections(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | None]:
        return {**super().build_projections(linear), "q_proj": None}

    def build_extra_parameters(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | nn.Parameter]:
        return {"synthesizer": PairsOfPositions(self.projection.config.num_heads, self.max_positions)}

    def project_query(self, layer: Layer, query: Tensor) -> Tensor:
        queries, batch, _ = query.shape
        return query.new_empty(batch, self.projection.config.num_heads, queries, 0)

    def scores(
        self, layer: Layer, q: Tensor, values: Tensor, positions: Tensor | None, training: bool
    ) -> RandomSynthesizer:
        weight, keys = layer.synthesizer(), values.size(2)
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
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.size(-1) ** -0.5)

    def forward(self) -> Tensor:
        """Return R. Hooks before this call may bring it."""
        return self.weight.clone() if self._forward_hooks else self.weight

    def extra_repr(self) -> str:
        heads, positions, _ = self.weight.shape
        return f"{heads} heads, {positions} positions"


register(
    Method(
        name="synthesizer-dense",
        title="The dense Synthesizer: scores of the query's own input",
        formula="S_i[t] = ReLU(x_t W_1,i + b_1,i) W_2,i + b_2,i,   W_2,i: d_k × n for a greatest length n",
        parts={"score": DenseScores},
        parameters="3·d·h·d_k + m·d_k·n",
        cached="h·d_k",
        papers=(
            SYNTHESIZER,
            MIXHEAD,
        ),
        examples=(
            {},
            {"synthesizer_heads": 1},
        ),
        preset=False,
    )
)

register(
    Method(
        name="synthesizer-random",
        title="The random Synthesizer: a learned matrix for each head",
        formula="S_i[t, s] = R_i[t, s],   R_i: n × n for a greatest length n, learned, from a normal distribution of variance 1/n",
        parts={"score": RandomScores},
        parameters="2·d·h·d_k + h·n²",
        cached="h·d_k",
        papers=(SYNTHESIZER,),
        preset=False,
    )
)
