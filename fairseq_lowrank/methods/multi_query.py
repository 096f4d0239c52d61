"""One projection of keys and one of values for all heads."""

from typing import ClassVar

from fairseq_lowrank.parts.projection import AttentionDims, Projection


class MultiQuery(Projection):
    """A separate W_q for each head, one key and one value for all heads (Shazeer 2019, arXiv 1911.02150)."""

    name = "multi-query"
    groups: ClassVar[tuple[int, ...] | None] = (1,)

    def __init__(self, dims: AttentionDims) -> None:
        super().__init__(dims)
        self.state_heads = 1


class SingleHeadProjection(MultiQuery):
    """SHA: one query for all heads too, so that heads are copies of each other; the output maps h·d_k to d.

    It is the base of multiple head embeddings (Xue and Aletras 2023).
    """

    name = "single"
    groups = ()

    def __init__(self, dims: AttentionDims) -> None:
        super().__init__(dims)
        self.query_heads = 1
