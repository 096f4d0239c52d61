"""Standard multi-head attention."""

from fairseq_lowrank.attention.projections.projection import Projection


class Independent(Projection):
    """Own W_q, W_k and W_v for each head (Vaswani et al. 2017, arXiv 1706.03762), or with g heads of keys and values one W_k and
    W_v for each group of h/g heads (GQA, Ainslie et al. 2023, arXiv 2305.13245)."""

    name = "independent"
