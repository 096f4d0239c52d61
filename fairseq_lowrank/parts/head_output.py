"""The output axis: what happens to the outputs of heads before the output projection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from fairseq_lowrank.parts.stages import LayerPart

if TYPE_CHECKING:
    from fairseq_lowrank.parts.sizes import LayerSizes


class HeadOutput(LayerPart):
    """A value of the output axis. It fills the steps ``heads`` and ``weights``.

    Args:
        config: of the layer.
    """

    heads_per_output: ClassVar[int] = 1
    """How many heads of queries make one output."""
    changes_queries: ClassVar[bool] = False
    """True if it works with separate queries and keys of each head only."""

    @classmethod
    def keys_per_output(cls, **options: Any) -> int:
        """Return how many heads of keys make one output, with these options of the part."""
        return 1

    def __init__(self, config: LayerSizes) -> None:
        super().__init__()
        self.config = config
