"""One projection of keys and one of values for all heads."""

from fairseq_lowrank.attention.projections.projection import Projection, Sizes


class MultiQuery(Projection):
    """Own W_q for each head, one key and one value for all (Shazeer 2019, arXiv 1911.02150)."""

    name = "multi-query"
    groups = (1,)

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.memory_heads = 1


class Single(MultiQuery):
    """SHA, the ground of multiple head embeddings (Xue and Aletras 2023): one query for all heads too, which are then copies
    of each other, with h·d_k → d at the output."""

    name = "single"
    groups = ()

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.query_heads = 1
