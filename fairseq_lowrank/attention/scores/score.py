"""What a kind of scores is to the attention layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from fairseq_lowrank.attention.projections.projection import Memory, Projection
from fairseq_lowrank.ops import AttentionMask, DotProduct, Scores


class Setting(NamedTuple):
    """What scores are told of their layer.

    Args:
        cross: keys and values come from an encoder.
        appended: the layer appends keys that stand at no position.
        max_positions: the most positions of a sentence, where that is known.
        synthesizer_heads: second layers of the dense synthesizer; ``None`` means one for each head.
        unused_key_projection: the dense synthesizer has a projection of keys, which feeds nothing.
    """

    cross: bool = False
    appended: bool = False
    max_positions: int | None = None
    synthesizer_heads: int | None = None
    unused_key_projection: bool = False


class Score:
    """A value of the score axis; what is here is the scaled dot product of queries and keys.

    It stands between the layer and the projection, which it asks for queries, memory and values. Parameters of its own are the
    layer's; each method is handed the layer, a :class:`~fairseq_lowrank.attention.MultiheadAttention`.

    Args:
        projection: of the layer.
        setting: of the layer.

    Attributes:
        memory_sizes: what is remembered, by name, and its size for one of the projection's ``memory_heads``.

    Raises:
        ValueError: a layer that these scores cannot work in.
    """

    name: ClassVar[str]
    """As on the command line."""

    def __init__(self, projection: Projection, setting: Setting) -> None:
        self.projection = projection
        self.memory_sizes = projection.memory_sizes

    @property
    def numbers(self) -> int:
        """How many numbers the largest weight holds that :meth:`make_further` makes, where a slip of the keyboard can
        make it large.
        """
        return 0

    @property
    def meaning(self) -> dict[str, int]:
        """What a state says of these scores beside their name."""
        return {}

    def make(self, layer: nn.Module, linear: Callable[..., nn.Module]) -> None:
        """Give ``layer`` the projections ``k_proj``, ``v_proj``, ``q_proj``, ``None`` where it has none.

        Args:
            linear: makes a projection of ``(inputs, outputs)``, with a bias where the layer's have one unless told ``bias=False``.
        """
        self.projection.make(layer, linear)

    def make_further(self, layer: nn.Module, linear: Callable[..., nn.Module]) -> None:
        """Give ``layer`` what these scores have beside projections, after all that fairseq's own layer draws, and start it."""

    def project_query(self, layer: nn.Module, query: Tensor) -> Tensor:
        """The heads' own features of ``query [T, B, embed_dim]``, which mixing reads: ``[B, H, T, D]``, or one for all heads."""
        return self.projection.project_query(layer, query)

    def project_memory(self, layer: nn.Module, key: Tensor, value: Tensor) -> Memory:
        """What is remembered of ``key [S, B, kdim]`` and ``value [S, B, vdim]``: all that a decoding step keeps of it.

        Raises:
            ValueError: a value that does not fit the key.
        """
        return self.projection.project_memory(layer, key, value)

    def attend_to(
        self, layer: nn.Module, q: Tensor, memory: Memory, mask: AttentionMask, *, whole_scores: bool, unit_rows: bool
    ) -> tuple[Scores, Tensor]:
        """The scores of queries, as :meth:`project_query` made them, against memory, and the values ``[B, G, S, D]``.

        The last of T queries stands where the last of S keys in memory does, in self-attention: T < S while decoding.

        Args:
            mask: which keys each query will see.
            whole_scores, unit_rows: see :meth:`.Projection.attend_to`.
        """
        entry = self.projection.attend_to(layer, q, memory, whole_scores=whole_scores, unit_rows=unit_rows)
        return DotProduct(entry.q, entry.k, layer.scaling), entry.v
