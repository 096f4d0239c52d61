"""Standard scores."""

from fairseq_lowrank.attention.scores.score import ScoreFunction


class ScaledDotProduct(ScoreFunction):
    """q_t k_sᵀ / √d_k (Vaswani et al. 2017, arXiv 1706.03762)."""

    name = "dot-product"
