"""One projection of keys and one of values for all heads."""

from typing import Any, ClassVar

from fairseq_lowrank.parts import AttentionConfig, Method, Paper, register
from fairseq_lowrank.parts.plain import Plain, grouped_weights
from fairseq_lowrank.parts.projection import Projection

MHE = Paper(
    "Pit One Against Many: Leveraging Attention-head Embeddings for Parameter-efficient Multi-head Attention",
    "Huiyin Xue, Nikolaos Aletras, Findings of EMNLP 2023 (poster)",
    "https://aclanthology.org/2023.findings-emnlp.695/",
)


class MultiQuery(Projection):
    """A separate W_q for each head, one key and one value for all heads (Shazeer 2019, arXiv 1911.02150)."""

    name = "multi-query"
    needs_keys = False
    groups: ClassVar[tuple[int, ...] | None] = (1,)

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.state_heads = 1

    def plain(self, layer: Any) -> Plain:
        return grouped_weights(layer)


class SingleHeadProjection(MultiQuery):
    """SHA: one query for all heads too, so that heads are copies of each other; the output maps h·d_k to d.

    It is the base of multiple head embeddings (Xue and Aletras 2023).
    """

    name = "single"
    groups = ()

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.query_heads = 1


register(
    Method(
        name="sha",
        title="One head, copied",
        formula="Q = x W_Q   K = y W_K   V = y W_V   O_i = softmax(Q Kᵀ / √d_k) V   for every i",
        parts={"projection": SingleHeadProjection},
        parameters="3·d·d_k + h·d_k·d",
        cached="2·d_k",
        kind="restricted",
        papers=(MHE,),
        colour="#c5b0d5",
    )
)

register(
    Method(
        name="mqa",
        title="Multi-query attention",
        formula="Q_i = x W_Q,i   K = y W_K   V = y W_V   O_i = softmax(Q_i Kᵀ / √d_k) V",
        parts={"projection": MultiQuery},
        parameters="2·d·h·d_k + 2·d·d_k",
        cached="2·d_k",
        kind="restricted",
        papers=(
            Paper(
                "Fast Transformer decoding: one write-head is all you need",
                "Shazeer 2019",
                "https://arxiv.org/abs/1911.02150",
            ),
        ),
        colour="#001a70",
    )
)
