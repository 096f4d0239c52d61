"""Standard multi-head attention; the head size and the number of keys and values may be chosen freely."""

from typing import Any

from fairseq_lowrank.ops.activation import Softmax
from fairseq_lowrank.parts import PLAIN, Method, Need, Paper, register
from fairseq_lowrank.parts.plain import Plain, grouped_weights
from fairseq_lowrank.parts.projection import Projection
from fairseq_lowrank.parts.score import ScoreFunction

FIXEDHEAD = Paper(
    "Low-Rank Bottleneck in Multi-head Attention Models",
    "Srinadh Bhojanapalli, Chulhee Yun, Ankit Singh Rawat, Sashank Reddi, Sanjiv Kumar, ICML 2020",
    "https://proceedings.mlr.press/v119/bhojanapalli20a.html",
)
PARAMETERS, CACHED = "4·d·h·d_k", "2·h·d_k"
"""Formulas of parameters and cache of plain attention, without biases."""


class StandardProjection(Projection):
    """A separate W_q, W_k and W_v for each head (Vaswani et al. 2017, arXiv 1706.03762).

    With g heads of keys and values, each W_k and W_v serves a group of h/g heads (GQA, Ainslie et al. 2023, arXiv 2305.13245).
    """

    name = "independent"
    needs_keys = False

    def plain(self, layer: Any) -> Plain:
        return grouped_weights(layer)


class ScaledDotProduct(ScoreFunction):
    """q_t k_sᵀ / √d_k (Vaswani et al. 2017, arXiv 1706.03762)."""

    name = "dot-product"


def class_of_sizes(layer: Any) -> str:
    """Return the class of a layer of independent projections with free sizes."""
    config = layer.config
    if config.head_dim * config.num_heads > config.embed_dim:
        return "QK"
    fewer = config.head_dim * config.num_heads < config.embed_dim or config.key_value_heads < config.num_heads
    return "restricted" if fewer else "equal"


register(
    Method(
        name=PLAIN,
        title="Standard multi-head attention",
        formula=(
            "Q_i = x W_Q,i   K_i = y W_K,i   V_i = y W_V,i\n"
            "P_i = softmax(Q_i K_iᵀ / √d_k)   O_i = P_i V_i   output = Σ_i O_i W_O,i"
        ),
        parts={"projection": StandardProjection, "score": ScaledDotProduct, "activation": Softmax},
        parameters=PARAMETERS,
        cached=CACHED,
        kind="equal",
        kind_of=class_of_sizes,
        papers=(
            Paper("Attention is all you need", "Vaswani et al. 2017", "https://arxiv.org/abs/1706.03762"),
            FIXEDHEAD,
        ),
        colour="#0072b2",
    )
)

register(
    Method(
        name="fixedhead",
        title="FixedHead: the head size chosen freely",
        formula=(
            "as `mha`, with d_k free of d/h (W_Q,i, W_K,i, W_V,i: d × d_k; W_O,i: d_k × d)\noutput = Σ_i O_i W_O,i"
        ),
        parameters=PARAMETERS,
        cached=CACHED,
        kind="QK",
        kind_of=class_of_sizes,
        papers=(FIXEDHEAD,),
        needs=Need("head_dim", "a head size", "the paper sets it to the sequence length"),
        examples=({"head_dim": 6},),
        colour="#602060",
    )
)

register(
    Method(
        name="gqa",
        title="Grouped-query attention",
        formula=(
            "Q_i = x W_Q,i   K_j = y W_K,j   V_j = y W_V,j   for g heads j of keys and values\n"
            "O_i = softmax(Q_i K_jᵀ / √d_k) V_j,   j = ⌊i·g/h⌋"
        ),
        parameters="2·d·h·d_k + 2·d·g·d_k",
        cached="2·g·d_k",
        kind="restricted",
        kind_of=class_of_sizes,
        papers=(
            Paper(
                "GQA: training generalized multi-query Transformer models from multi-head checkpoints",
                "Ainslie et al. 2023",
                "https://arxiv.org/abs/2305.13245",
            ),
        ),
        needs=Need("key_value_heads", "a number of key and value heads", "the paper takes 8 for 64 heads"),
        examples=({"key_value_heads": 1}, {"key_value_heads": 2}),
        colour="#6b3fa0",
    )
)
