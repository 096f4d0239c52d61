"""The output axis: what happens to the outputs of heads before the output projection."""

from __future__ import annotations

from typing import ClassVar

from fairseq_lowrank.parts.part import Place
from fairseq_lowrank.parts.projection import AttentionDims
from fairseq_lowrank.parts.stages import LayerPart


class HeadOutput(LayerPart):
    """A value of the output axis. It fills the steps ``heads`` and ``weights``.

    Args:
        dims: the sizes of the layer.
    """

    heads_per_output: ClassVar[int] = 1
    """How many heads of queries make one output."""
    changes_queries: ClassVar[bool] = False
    """True if it works with separate queries and keys of each head only."""

    def __init__(self, dims: AttentionDims) -> None:
        super().__init__()
        self.dims = dims

    @classmethod
    def check_place(cls, axis: str, place: Place) -> None:
        super().check_place(axis, place)
        if cls.reads_own_value and (not place.self_attention or place.has_appended_keys):
            raise ValueError(
                f"{axis} {cls.name!r} reads the value at each query's own position, so it needs self-attention "
                "without appended keys. Choose sites without cross attention (--attention-sites encoder,decoder, "
                "sites=['encoder', 'decoder'])."
            )
