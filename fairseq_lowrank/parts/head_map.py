"""The map axis: static linear maps of projected queries, keys and values, over features or over heads."""

from __future__ import annotations

from typing import ClassVar

import torch

from fairseq_lowrank.parts.parameters import assign
from fairseq_lowrank.parts.projection import AttentionDims
from fairseq_lowrank.parts.stages import LayerPart


class HeadMap(LayerPart):
    """A value of the map axis. It fills the steps ``queries`` and ``states``."""

    reads_inputs: ClassVar[bool] = False
    changes_queries: ClassVar[bool] = True
    """True if it works with separate queries and keys of each head only."""

    def __init__(self, dims: AttentionDims) -> None:
        super().__init__()

    def reset_parameters(self) -> None:
        for matrix in self.parameters():
            assign(matrix, torch.eye(len(matrix)))

    def equation(self) -> str:
        """Return how a map ``[., .]`` and weights ``[H, D, inputs]`` give mapped weights, for ``torch.einsum``."""
        raise NotImplementedError
