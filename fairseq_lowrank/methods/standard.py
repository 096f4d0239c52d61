"""Standard multi-head attention; the head size and the number of keys and values may be chosen freely."""

from fairseq_lowrank.parts.projection import Projection
from fairseq_lowrank.parts.score import ScoreFunction


class StandardProjection(Projection):
    """A separate W_q, W_k and W_v for each head (Vaswani et al. 2017, arXiv 1706.03762).

    With g heads of keys and values, each W_k and W_v serves a group of h/g heads (GQA, Ainslie et al. 2023, arXiv 2305.13245).
    """

    name = "independent"


class ScaledDotProduct(ScoreFunction):
    """q_t k_sᵀ / √d_k (Vaswani et al. 2017, arXiv 1706.03762)."""

    name = "dot-product"
