"""What a projection is to the attention layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from fairseq_lowrank.ops import AttentionCall

Memory = dict[str, Tensor]
"""What keys and values are made of, by name, ``[B, G, S, D]`` each: all that a decoding step keeps."""


class Sizes(NamedTuple):
    """The sizes of a layer."""

    embed_dim: int
    num_heads: int
    head_dim: int
    value_dim: int
    kdim: int
    vdim: int
    key_value_heads: int | None = None


class Entry(NamedTuple):
    """What enters the operation: ``q [B, H, T, D]`` (or one head for all), ``k [B, G, S, D]`` and ``v [B, G', S, D']``, where G
    and G' divide H and D and D' may be any sizes."""

    q: Tensor
    k: Tensor
    v: Tensor


class Projection:
    """A value of the projection axis; what is here is standard attention with a number of heads of queries and of memory.

    Its parameters are the layer's, under fairseq's names, so that checkpoints travel; each method is handed the layer, a
    :class:`~fairseq_lowrank.attention.MultiheadAttention`.

    Args:
        sizes: of the layer.

    Raises:
        ValueError: sizes that this projection cannot work with.
    """

    name: ClassVar[str]
    """As on the command line."""
    groups: ClassVar[tuple[int, ...] | None] = None
    """The numbers of key and value heads that may be asked for; ``None`` means any that divides the heads."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.query_heads = sizes.num_heads
        self.memory_heads = sizes.key_value_heads or sizes.num_heads
        if self.groups is not None and sizes.key_value_heads not in (None, *self.groups):
            expected = " or ".join(["none", *map(str, self.groups)])
            raise ValueError(f"key_value_heads={sizes.key_value_heads}: projection {self.name!r} expects {expected}")
        self.memory_sizes = {"key": sizes.head_dim, "value": sizes.value_dim}
        """What is remembered, by name, and its size for one of the ``memory_heads``."""

    def make(self, layer: nn.Module, linear: Callable[..., nn.Module]) -> None:
        """Give ``layer`` its projections: k, v, q in fairseq's order, so that the same seed draws the same weights.

        Args:
            linear: makes a projection of ``(inputs, outputs)``.
        """
        sizes = self.sizes
        layer.k_proj = linear(sizes.kdim, self.memory_heads * sizes.head_dim)
        layer.v_proj = linear(sizes.vdim, self.memory_heads * sizes.value_dim)
        layer.q_proj = linear(sizes.embed_dim, self.query_heads * sizes.head_dim)

    def make_further(self, layer: nn.Module) -> None:
        """Give ``layer`` what it has beside projections, after all that fairseq's own layer draws."""

    def project_query(self, layer: nn.Module, query: Tensor) -> Tensor:
        """The heads' own queries, which mixing reads: ``[T, B, embed_dim]`` to ``[B, H, T, head_dim]``, or one for all heads."""
        return split_heads(layer.q_proj(query), self.sizes.head_dim)

    def project_memory(self, layer: nn.Module, key: Tensor, value: Tensor) -> Memory:
        """What is remembered of ``key [S, B, kdim]`` and ``value [S, B, vdim]``.

        Raises:
            ValueError: a value that does not fit the key.
        """
        projected = {"key": layer.k_proj(key), "value": layer.v_proj(value)}
        return {name: split_heads(tensor, self.memory_sizes[name]) for name, tensor in projected.items()}

    def attend_to(self, layer: nn.Module, q: Tensor, memory: Memory, *, whole_scores: bool, unit_rows: bool) -> Entry:
        """How queries, as :meth:`project_query` made them, and memory enter the operation.

        Args:
            whole_scores: scores may not lack what is the same in a whole row.
            unit_rows: the weights of a row sum to 1, or to 0 where it sees no key.
        """
        return Entry(q, memory["key"], memory["value"])

    def finish(self, layer: nn.Module, heads: Tensor, call: AttentionCall) -> Tensor:
        """``[B, H, T, value_dim]`` (or one head for all) of what the operation made of ``call``."""
        return heads

    def head_values(self, layer: nn.Module, memory: Memory) -> Tensor:
        """The values that each head averages, ``[B, H, S, value_dim]``."""
        return memory["value"].repeat_interleave(self.sizes.num_heads // memory["value"].size(1), dim=1)


def split_heads(projected: Tensor, size: int) -> Tensor:
    """``[N, B, heads * size]`` to ``[B, heads, N, size]``."""
    return projected.unflatten(-1, (-1, size)).permute(1, 2, 0, 3)
