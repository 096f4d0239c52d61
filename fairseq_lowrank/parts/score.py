"""The score axis: how scores are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from fairseq_lowrank.ops import AttentionMask, DotProduct, Scores
from fairseq_lowrank.parts.part import Part
from fairseq_lowrank.parts.projection import KeyValueStates, Layer, Projection

if TYPE_CHECKING:
    from fairseq_lowrank.parts.sizes import LayerSizes


class ScoreFunction(Part):
    """A value of the score axis. This base class is the scaled dot product of queries and keys.

    A score function gets queries, cached tensors and values from the projection. Like a projection it holds no parameters:
    it builds modules, which the layer adopts, and reads them there.

    Args:
        projection: of the layer, with its sizes.

    Attributes:
        state_sizes: names of the cached tensors, and their size for one of the projection's ``state_heads``.

    Raises:
        ValueError: a layer in which these scores cannot work.
    """

    has_queries: ClassVar[bool] = True
    """False if scores are computed without queries."""
    unused_modules: tuple[str, ...] = ()
    """The modules whose parameters nothing reads."""
    positions_reason: ClassVar[str | None] = None
    """Why rotary positions have no meaning, if they have none."""

    def __init__(self, projection: Projection) -> None:
        self.projection = projection
        self.state_sizes = projection.state_sizes
        self.scale = projection.score_size**-0.5

    @classmethod
    def check_place(cls, axis: str, config: LayerSizes) -> None:
        super().check_place(axis, config)
        if config.rotary and cls.positions_reason is not None:
            raise ValueError(f"rotary with {axis} {cls.name!r}: {cls.positions_reason}. Use {axis} 'dot-product'.")

    @property
    def key_heads(self) -> int:
        """The number of different keys that heads compare queries with, whose scores static mixing adds up."""
        return self.projection.key_heads

    def rank(self, *, mixed: bool) -> int:
        """Return the greatest rank of a head's scores.

        Args:
            mixed: the scores of all heads are mixed.
        """
        config = self.projection.config
        return min(config.embed_dim, config.kdim, self.projection.score_rank(mixed=mixed))

    @property
    def num_parameters(self) -> int:
        """The size of the largest weight from :meth:`build_extra_parameters` that a typing error can make huge."""
        return 0

    @property
    def state_config(self) -> dict[str, int]:
        """Settings that a state dict saves together with the name of these scores."""
        return {}

    def build_projections(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | None]:
        """Build the projections ``k_proj``, ``v_proj``, ``q_proj``; ``None`` if there is none.

        Args:
            linear: builds a projection from ``(inputs, outputs)``. It has the layer's kind of bias, unless ``bias=False``.
        """
        return self.projection.build_projections(linear)

    def build_extra_parameters(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | nn.Parameter]:
        """Build what is not a projection. The layer calls this after everything that fairseq's own layer draws."""
        return {}

    def reset_parameters(self, layer: Layer) -> None:
        """Set what :meth:`build_extra_parameters` built to its initial values."""

    def project_query(self, layer: Layer, query: Tensor) -> Tensor:
        """Return the heads' own features of ``query [T, B, embed_dim]``, which mixing reads.

        The result is ``[B, H, T, D]``, or one head for all.
        """
        return self.projection.project_query(layer, query)

    def project_key_value(self, layer: Layer, key: Tensor, value: Tensor) -> KeyValueStates:
        """Return the tensors to cache for ``key [S, B, kdim]`` and ``value [S, B, vdim]``.

        Raises:
            ValueError: a value that does not fit the key.
        """
        return self.projection.project_key_value(layer, key, value)

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
        """Return the scores of queries from :meth:`project_query`, and the values ``[B, G, S, D]``.

        In self-attention the last of T queries has the position of the last of S cached keys: T < S while decoding.

        Args:
            mask: which keys each query will see.
            training: the layer is in training mode.
            keep_row_constants, rows_sum_to_one: see :meth:`.Projection.attention_inputs`.
        """
        q, k, v = self.projection.attention_inputs(
            layer, q, states, keep_row_constants=keep_row_constants, rows_sum_to_one=rows_sum_to_one
        )
        return DotProduct(q, k, self.scale), v
