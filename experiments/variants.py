"""The pages of attention variants, from their declarations, counts of built layers, and results.

A new preset needs an entry in :data:`VARIANTS`; ``tests/experiments/test_variants.py`` compares its formulas with built layers.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, geometric_mean, stdev

import torch

import fairseq_lowrank
from experiments.recipes.results import read_results
from experiments.reporting.papers import load_papers
from fairseq_lowrank.attention import AXES, PRESETS, AttentionSpec, MultiheadAttention, build_attention
from fairseq_lowrank.attention.classes import CLASSES, PRESET_CLASSES
from fairseq_lowrank.ops.activation import ACTIVATIONS

PACKAGE = Path(fairseq_lowrank.__file__).parent
RESULTS = PACKAGE.parent / "results"
EMBED_DIM, HEADS, POSITIONS = 512, 8, 512
VOCABULARY, EMBED_RANK = 10_000, 64
DEFAULT_RANK = 2
"""The rank of dynamic mixing unless a spec sets one."""
CLASS_TESTS = {
    "equal": "test_every_plain_layer_is_one_of_an_equal_method",
    "restricted": "test_plain_weights_give_the_same_outputs",
    "OV": "test_outputs_of_class_ov_come_from_no_output_projection",
    "QK": "test_scores_exceed_the_head_size_only_in_class_qk",
    "patterns": "test_scores_of_tpa_are_not_bilinear",
}
"""The test in ``tests/attention/test_class.py`` that proves each class."""

PAPERS = {
    "synthesizer": (
        "Synthesizer: rethinking self-attention for Transformer models",
        "Tay et al. 2020",
        "https://arxiv.org/abs/2005.00743",
    ),
    "transformer-xl": (
        "Transformer-XL: attentive language models beyond a fixed-length context",
        "Dai et al. 2019",
        "https://arxiv.org/abs/1901.02860",
    ),
    "talking-heads": ("Talking-heads attention", "Shazeer et al. 2020", "https://arxiv.org/abs/2003.02436"),
    "transformer": ("Attention is all you need", "Vaswani et al. 2017", "https://arxiv.org/abs/1706.03762"),
    "gqa": (
        "GQA: training generalized multi-query Transformer models from multi-head checkpoints",
        "Ainslie et al. 2023",
        "https://arxiv.org/abs/2305.13245",
    ),
    "mqa": (
        "Fast Transformer decoding: one write-head is all you need",
        "Shazeer 2019",
        "https://arxiv.org/abs/1911.02150",
    ),
    "el": (
        "EL-Attention: memory efficient lossless attention for generation",
        "Yan et al. 2021",
        "https://arxiv.org/abs/2105.04779",
    ),
    "sigsoftmax": (
        "Sigsoftmax: reanalysis of the softmax bottleneck",
        "Kanai et al. 2018",
        "https://arxiv.org/abs/1805.10829",
    ),
    "gated": (
        "Gated attention for large language models: non-linearity, sparsity, and attention-sink-free",
        "Qiu et al. 2025",
        "https://arxiv.org/abs/2505.06708",
    ),
    "mla": (
        "DeepSeek-V2: a strong, economical, and efficient mixture-of-experts language model",
        "DeepSeek-AI 2024",
        "https://arxiv.org/abs/2405.04434",
    ),
    "dcmha": (
        "Improving Transformers with dynamically composable multi-head attention",
        "Xiao et al. 2024",
        "https://arxiv.org/abs/2405.08553",
    ),
    "diff": (
        "Differential Transformer, in its second version",
        "Microsoft, Diff-Transformer-V2",
        "https://github.com/microsoft/unilm/tree/master/Diff-Transformer",
    ),
    "collaborative": (
        "Multi-head attention: collaborate instead of concatenate",
        "Cordonnier et al. 2020",
        "https://arxiv.org/abs/2006.16362",
    ),
    "mfa": (
        "Multi-matrix factorization attention",
        "Hu et al. 2024",
        "https://arxiv.org/abs/2412.19255",
    ),
    "lrkv": ("Low-rank key value attention", "O'Neill et al. 2026", "https://arxiv.org/abs/2601.11471"),
    "tpa": ("Tensor product attention is all you need", "Zhang et al. 2025", "https://arxiv.org/abs/2501.06425"),
    "xsa": ("Exclusive self-attention", "Zhai 2026", "https://arxiv.org/abs/2603.09078"),
    "knocking": ("Knocking-heads attention", "Zhou et al. 2025", "https://arxiv.org/abs/2510.23052"),
    "mea": (
        "Explicit multi-head attention for inter-head interaction in large language models",
        "Peng et al. 2026",
        "https://arxiv.org/abs/2601.19611",
    ),
}
"""Title, authors and address of papers without a table of ours; the others are in ``reporting/papers.json``."""


@dataclass(frozen=True)
class Variant:
    """The declaration of a variant; the rest of its page is computed.

    Args:
        title: the name in words.
        formula: the formula of head i of h, with queries Q_i, keys K_i, values V_i and P_i = softmax(Q_i K_iᵀ/√d_k).
        parameters: the formula of the parameters of one layer without biases, see :func:`evaluate`.
        cached: the formula of the values that a decoding layer caches for a token.
        papers: keys of :data:`PAPERS` or of ``reporting/papers.json``; empty if the variant is from this project.
        notes: exact properties, and what to know before choosing the variant.
        preset: the value of ``--attention``; ``None`` if the variant is not attention.
        axes: values that override the preset, with example sizes.
    """

    title: str
    formula: str
    parameters: str
    cached: str | None
    papers: tuple[str, ...]
    notes: str
    preset: str | None
    axes: dict[str, int | str] = field(default_factory=dict)


_PARAMETERS = "4·d·h·d_k"
_CACHED = "2·h·d_k"
_OUTPUT = "output = Σ_i O_i W_O,i"
_OWN = "Q_i = x W_Q,i   K_i = y W_K,i   V_i = y W_V,i"

VARIANTS: dict[str, Variant] = {
    "mha": Variant(
        "Standard multi-head attention",
        f"{_OWN}\nP_i = softmax(Q_i K_iᵀ / √d_k)   O_i = P_i V_i   {_OUTPUT}",
        _PARAMETERS,
        _CACHED,
        ("transformer", "fixedhead"),
        "The scores of a head have rank d_k at most. This is the low-rank bottleneck. With positions of full rank, a head of size n − 1 "
        "can make any positive pattern over n positions, because softmax ignores a constant in each row. A causal mask leaves half of the "
        "scores free. Then a head of size (n − 1)/2 can make almost any pattern: all except a set of measure zero. For example, with n 3 and "
        "d_k 1 it cannot make the rows (0.7, 0.3) and (0.4, 0.4, 0.2). `mha` equals fairseq's own module, number for number, and loads its "
        "checkpoints.",
        "mha",
    ),
    "fixedhead": Variant(
        "FixedHead: the head size chosen freely",
        f"as `mha`, with d_k free of d/h (W_Q,i, W_K,i, W_V,i: d × d_k; W_O,i: d_k × d)\n{_OUTPUT}",
        _PARAMETERS,
        _CACHED,
        ("fixedhead",),
        "Theorem 1 of the paper: with positions of full rank and d_k ≥ n, a head can make any positive row-stochastic n × n matrix. With some "
        "smaller d_k it cannot. Beyond the paper: n − 1 is enough, because softmax ignores a constant in each row. For almost every causal "
        "pattern, (n − 1)/2 is enough. The cache grows with the head size too. Counted with heads of 128.",
        "fixedhead",
        {"head_dim": 128},
    ),
    "gqa": Variant(
        "Grouped-query attention",
        "Q_i = x W_Q,i   K_j = y W_K,j   V_j = y W_V,j   for g heads j of keys and values\n"
        "O_i = softmax(Q_i K_jᵀ / √d_k) V_j,   j = ⌊i·g/h⌋",
        "2·d·h·d_k + 2·d·g·d_k",
        "2·g·d_k",
        ("gqa",),
        "g = h is `mha`, and g = 1 is `mqa`. It saves cache, and parameters of keys and values. The rank of a head's scores stays "
        "d_k. Counted with two heads of keys and values.",
        "gqa",
        {"key_value_heads": 2},
    ),
    "mixhead-a": Variant(
        "Mixhead A: static mixing of probabilities",
        "P̄_i = Σ_j M[j, i] P_j   O_i = P̄_i V_i,   M learned, from I",
        f"{_PARAMETERS} + h²",
        _CACHED,
        ("mixhead",),
        "Mixing after the softmax leaves each pattern P_j as it is. It widens the map from values to outputs, whose rank becomes "
        "min(d, h·d_k). The reason: Σ_i Σ_j M[j, i] P_j V_i W_O,i = Σ_j P_j (Σ_i M[j, i] V_i W_O,i). If all heads share one value (`mqa`, "
        "`sha`, `mhe-mul`), the output projection absorbs M.",
        "mixhead-a",
    ),
    "mixhead-b": Variant(
        "Mixhead B: each query mixes for itself",
        "M_t[j, i] = q_{t,j} · W^M[:, i] + B[j, i]   P̄_i[t] = Σ_j M_t[j, i] P_j[t],   W^M from 0, B from I",
        f"{_PARAMETERS} + h² + d_k·h",
        _CACHED,
        ("mixhead",),
        "q_{t,j} is head j's query after a head embedding, if there is one, and before the scale 1/√d_k. With W^M = 0 it is Mixhead A. "
        "No fixed output projection absorbs it.",
        "mixhead-b",
    ),
    "mixhead-random": Variant(
        "Mixing by a fixed random matrix",
        "P̄_i = Σ_j M[j, i] P_j,   M normal, columns of sum 1, never trained",
        _PARAMETERS,
        _CACHED,
        ("mixhead",),
        "An ablation: mixing that is not learned. Columns are divided by their sums (eq. 13), as in the authors' released code. M is saved "
        "with the model (h² numbers, which are not parameters).",
        "mixhead-random",
    ),
    "avghead": Variant(
        "Mixing by the mean",
        "P̄_i = 1/h Σ_j P_j,   the same for every head",
        _PARAMETERS,
        _CACHED,
        ("mixhead",),
        "An ablation: all heads have the same pattern, and only their values differ. M is 1/h and never trained, which is our reading of the "
        'paper\'s "uniform". It is saved with the model (h² numbers, which are not parameters).',
        "avghead",
    ),
    "gain": Variant(
        "A number for each head",
        "P̄_i = w_i P_i,   w learned, from 1",
        f"{_PARAMETERS} + h",
        _CACHED,
        (),
        "The control for every claim on mixing: only the diagonal of M. The output projection absorbs it exactly: "
        "w_i P_i V_i W_O,i = P_i V_i (w_i W_O,i). So it can express the same as `mha`, and differs only in training. Fairseq's "
        "`--scale-heads` scales slices of the projected output instead, and only in decoders.",
        "gain",
    ),
    "talking-heads": Variant(
        "Talking heads: mixing before and after the softmax",
        "S_i = Q_i K_iᵀ / √d_k   S'_i = Σ_j L[j, i] S_j   P_i = softmax(S'_i)   P̄_i = Σ_j M[j, i] P_j   O_i = P̄_i V_i,   L and M learned, from I",
        f"{_PARAMETERS} + 2·h²",
        _CACHED,
        ("talking-heads",),
        "Mixing before the softmax raises the rank of the scores, which is the bottleneck: Σ_j L[j, i] Q_j K_jᵀ has rank min(d, h·d_k). "
        "Mixing after the softmax widens the map from values to outputs, as in Mixhead A. Masks and biases are added to the mixed "
        "scores, so a −∞ is never mixed.",
        "talking-heads",
    ),
    "mhe-add": Variant(
        "Multiple head embeddings, added",
        "Q_i = x W_Q + e^q_i   K_i = y W_K + e^k_i   V_i = y W_V + e^v_i   O_i = P_i V_i",
        "3·d·d_k + 3·h·d_k + h·d_k·d",
        "2·d_k",
        ("mhe",),
        "It is exactly multi-query attention. e^k_i adds (q + e^q_i)·e^k_i/√d_k to an entire row, and softmax cancels this. (Sigsoftmax does "
        "not, and softmax with an appended key of zeros does not.) e^v_i adds e^v_i times the sum of the row. So one key and one value are "
        "projected, cached and read. All heads share a value of size d_k, which limits the rank of the output.",
        "mhe-add",
    ),
    "mhe-mul": Variant(
        "Multiple head embeddings, multiplied",
        "Q_i = x W_Q ⊙ (1 + e^q_i)   K_i = y W_K ⊙ (1 + e^k_i)   V_i = y W_V ⊙ (1 + e^v_i)   O_i = P_i V_i",
        "3·d·d_k + 3·h·d_k + h·d_k·d",
        "2·d_k",
        ("mhe",),
        "It is exactly multi-query attention. The query absorbs (1 + e^q_i)(1 + e^k_i), there is one key and one value, and head i's output is "
        "multiplied by (1 + e^v_i). All heads share a value of size d_k, which limits the rank of the output.",
        "mhe-mul",
    ),
    "sha": Variant(
        "One head, copied",
        "Q = x W_Q   K = y W_K   V = y W_V   O_i = softmax(Q Kᵀ / √d_k) V   for every i",
        "3·d·d_k + h·d_k·d",
        "2·d_k",
        ("mhe",),
        "The base of MHE, and the unit of PEoP. All heads are equal, so mixing them only scales each head.",
        "sha",
    ),
    "mqa": Variant(
        "Multi-query attention",
        "Q_i = x W_Q,i   K = y W_K   V = y W_V   O_i = softmax(Q_i Kᵀ / √d_k) V",
        "2·d·h·d_k + 2·d·d_k",
        "2·d_k",
        ("mqa",),
        "It is `gqa` with one head of keys and values. With one shared value, mixing probabilities equals mixing head outputs: "
        "P̄_i V = Σ_j M[j, i] (P_j V). So the output projection absorbs a static M.",
        "mqa",
    ),
    "skv": Variant(
        "Shared keys and values",
        "Q_i = x W_Q,i   K_i = V_i = y W_K,i   O_i = softmax(Q_i K_iᵀ / √d_k) K_i",
        "3·d·h·d_k",
        "h·d_k",
        ("mhe",),
        "Half the cache of `mha`, because only keys are cached. The value input must be the key input.",
        "skv",
    ),
    "el": Variant(
        "EL-attention",
        "Q_i = x W_Q,i   K_i = V_i = y[:, i·d_k : (i + 1)·d_k]   O_i = softmax(Q_i K_iᵀ / √d_k) K_i",
        "2·d·h·d_k",
        "h·d_k",
        ("el", "mhe"),
        "Keys and values are the hidden states, divided among heads, as the MHE poster defines it. So d_k = d/h, and h·d_k = d numbers are "
        "cached.",
        "el",
    ),
    "gated-head": Variant(
        "Gated heads: a sigmoid for each head",
        "O_i = 2σ(x w_i) P_i V_i,   w_i: d → 1, from 0",
        f"{_PARAMETERS} + d·h",
        _CACHED,
        ("gated",),
        "Each query weights each head's output by a number between 0 and 2. At first it equals `mha`. `--gate-start half` gives σ as "
        "published, which halves the outputs at first. A smaller initial output can speed up training by itself, so compare both. Use it "
        "if you want the cheapest output that depends on the query.",
        "gated-head",
    ),
    "gated": Variant(
        "Gated attention: a sigmoid for each feature of each head",
        "O_i = 2σ(x W_i) ⊙ P_i V_i,   W_i: d × d_k, from 0",
        f"{_PARAMETERS} + d·h·d_k",
        _CACHED,
        ("gated",),
        "Each query weights each feature of each head's output. At first it equals `mha`. `--gate-start half` gives σ as published, which "
        "halves the outputs at first. Use it if a quarter more attention parameters are acceptable.",
        "gated",
    ),
    "mla": Variant(
        "Multi-head latent attention, without its rotary part",
        "c = RMSNorm(y W_c)   K_i = c W^k_i   V_i = c W^v_i   Q_i = x W_Q,i,   W_c: d × r",
        "d·r + 2·r·h·d_k + 2·d·h·d_k + r",
        "r",
        ("mla",),
        "A token caches r numbers. For few queries, the query absorbs W^k and the output absorbs W^v, so c is the one key and value of all "
        "heads. Except for its norm, it is plain attention with factored weights. Keys and values need one input, and scores are dot "
        "products. Use it if the cache of decoding is too large. Counted with r = d/2, the default.",
        "mla",
    ),
    "dcmha": Variant(
        "Dynamically composable heads: each query mixes scores and probabilities",
        "M_t = I + Σ_ρ w1_ρ(x_t) w2_ρ(x_t)ᵀ + diag(tanh(x_t W_d))   for ρ = 1 … r\n"
        "S'_i[t] = Σ_j L_t[j, i] S_j[t]   P̄_i[t] = Σ_j M_t[j, i] P_j[t],   w2 and W_d from 0, L_t built like M_t",
        f"{_PARAMETERS} + 4·d·h·r + 2·d·h",
        _CACHED,
        ("dcmha",),
        "The query-wise part of DCMHA, before and after the softmax. At first it equals `mha`. The matrices are computed from the layer's "
        "input, so `--mixing-orthogonality` is refused. Use it if you want the strongest mixing and accept its cost. Counted with rank "
        "r = 2, the default (`--rank`).",
        "dcmha",
    ),
    "diff": Variant(
        "Differential attention: one pattern less another",
        "O_i = P_2i V_i − σ(x w_i) P_2i+1 V_i,   w_i: d → 1, from 0",
        "5·d·h·d_k + d·h",
        _CACHED,
        ("diff",),
        "Two heads of queries share the key and value of head i, as in the authors' second version. There are 2h heads of queries, so queries "
        "have twice the parameters. It does not equal `mha` at first. `--load-alignments` refuses it, because its weights can be "
        "negative. With a constant factor it is plain attention of 2h heads. Use it if attention spreads over irrelevant tokens.",
        "diff",
    ),
    "collaborative": Variant(
        "Collaborative heads: shared queries and keys, weighed by each head",
        "S_i = (x W_Q) diag(m_i) (y W_K)ᵀ / √d_k   V_i = y W_V,i,   W_Q and W_K: d × D, m_i from ones in block i",
        "2·d·D + h·D + 2·d·h·d_k",
        "D + h·d_k",
        ("collaborative",),
        "All heads share D features, and each head weights them. With D = h·d_k, the default, it can be every plain attention; "
        "`fairseq-lowrank convert` does this exactly. With D > d_k the scores of a head can have rank D. Use it if heads of a trained model "
        "are redundant and you want a smaller D. Counted with D 256.",
        "collaborative",
        {"shared_dim": 256},
    ),
    "mfa": Variant(
        "Multi-matrix factorization attention: wide queries through a latent",
        "Q_i = (x C) U_i   K = y W_K   V = y W_V   O_i = softmax(Q_i Kᵀ / √d_k) V,   C: d × r, U_i: r × d_k",
        "d·r + r·h·d_k + 2·d·d_k + h·d_k·d",
        "2·d_k",
        ("mfa",),
        "All heads share one key and one value, so heads can be wide (`--head-dim`) with a small cache. "
        "Here d_k is the head size and r the size of the latent (`--latent-dim`). Use it if you want scores of high rank and a small cache. "
        "Counted with d_k 128 and r 256. The known matrices were learned with d_k 64, and the nearest point with d_k 32.",
        "mfa",
        {"head_dim": 128, "latent_dim": 256},
    ),
    "lrkv": Variant(
        "Low-rank differences of keys and values",
        "K_i = y W_K + y A_i B_i   V_i = y W_V + y A'_i B'_i,   A_i: d × r, B_i: r × d_k",
        "2·d·d_k + 2·d·h·r + 2·h·r·d_k + 2·d·h·d_k",
        "2·d_k + 2·h·r",
        ("lrkv",),
        "All heads share one key and one value, and each adds a difference of rank r. r = 0 would be `mqa`. With r = d_k it can be every plain "
        "attention, and `fairseq-lowrank convert` does this exactly. The query and the output absorb B_i. Use it if `mqa` loses too much and "
        "`mha` caches too much. Counted with r = d_k/4, the default (`--rank`).",
        "lrkv",
    ),
    "tpa": Variant(
        "Tensor product attention, without its rotary part",
        "K_i(y) = 1/r Σ_ρ a_ρ(y)_i b_ρ(y),   a_ρ: d → h, b_ρ: d → d_k linear\nV_i likewise, Q_i likewise with r_q products",
        "2·d·h·r + 2·d·d_k·r + d·h·r_q + d·d_k·r_q + h·d_k·d",
        "2·h·r + 2·d_k·r",
        ("tpa",),
        "Queries, keys and values are quadratic in the input, so scores are not bilinear in the inputs of queries and keys. A token caches "
        "the factors. The projections have no bias. Use it if both parameters and cache must be small. Counted with r = 2 (`--rank`) and r_q = 6 "
        "(`--query-rank`), the defaults.",
        "tpa",
    ),
    "xsa": Variant(
        "Exclusive self-attention: without the position's own value",
        "O_i[t] = P_i[t] V_i − tanh(α_i) (P_i[t] V_i · v̂_t) v̂_t,   v̂_t = V_i[t] / ‖V_i[t]‖, α from 0",
        f"{_PARAMETERS} + h",
        _CACHED,
        ("xsa",),
        "A head removes the direction of the value at the same position, which the residual connection already carries. At first it equals `mha`. "
        "Cross attention has no own value: with an encoder and a decoder, add `--attention-sites encoder,decoder`. Use it if you want the "
        "cheapest change of self-attention.",
        "xsa",
    ),
    "knocking-linear": Variant(
        "Knocking heads, linear: a shared map of features",
        "Q_i = x W_Q,i T_q   K_i = y W_K,i T_k   V_i = y W_V,i T_v,   T: d_k × d_k, shared by all heads, from I",
        f"{_PARAMETERS} + d_k² + d_k² + d_k²",
        _CACHED,
        ("knocking",),
        "The projections absorb the maps, so it can compute the same as `mha`. `fairseq-lowrank convert` folds them. A gain can only come "
        "from optimisation. Use it if you want to test this gain.",
        "knocking-linear",
    ),
    "mea": Variant(
        "Explicit mixing of keys and values over heads, without norms",
        "K_i ← Σ_j A[j, i] K_j   V_i ← Σ_j C[j, i] V_j,   A and C: h × h, from I",
        f"{_PARAMETERS} + 2·h²",
        _CACHED,
        ("mea",),
        "The projections absorb the maps, so it can compute the same as `mha`. `fairseq-lowrank convert` folds them. A gain can only come "
        "from optimisation. Use it if you want to test this gain.",
        "mea",
    ),
    "sigsoftmax": Variant(
        "Sigsoftmax in place of softmax",
        "P_i[t, s] ∝ exp(a) σ(a)   with the score a = (Q_i K_iᵀ / √d_k)[t, s],   computed as softmax(a + log σ(a))",
        _PARAMETERS,
        _CACHED,
        ("sigsoftmax", "mixhead"),
        "Log-probabilities are not the scores minus a constant in each row, so their rank can exceed that of the scores. It is not invariant "
        "under a shift of a row, so a constant in a row has an effect. It is an activation, so it works with every preset.",
        "mha",
        {"activation": "sigsoftmax"},
    ),
    "relative": Variant(
        "Transformer-XL's scores: content and relative position",
        "S_i[t, s] = ((q_t + u_i)·k_s + (q_t + v_i)·r_{t−s}) / √d_k,   r_δ = W_R,i R_δ with R_δ sinusoidal, u_i and v_i learned",
        f"{_PARAMETERS} + d·h·d_k + 2·h·d_k",
        _CACHED,
        ("transformer-xl",),
        "Positions are distances, so memory of earlier segments can precede the keys. Nothing of size n × n is stored. W_R has the "
        "same number of heads as keys. A key embedding (MHE) changes only k_s, and Mixhead B reads q_t. The term of positions is not limited by "
        "the rank of the keys, so the scores of a head can exceed rank d_k. It does not work with cross attention, EL or appended keys.",
        "mha",
        {"score": "relative"},
    ),
    "synthesizer-dense": Variant(
        "The dense Synthesizer: scores of the query's own input",
        "S_i[t] = ReLU(x_t W_1,i + b_1,i) W_2,i + b_2,i,   W_2,i: d_k × n for a greatest length n",
        "3·d·h·d_k + h·d_k·n",
        "h·d_k",
        ("synthesizer", "mixhead"),
        "W_1 is q_proj, and there are no keys. Column s of W_2 acts like a key for the features ReLU(x_t W_1), but it is the same in every "
        "sentence. So this is dot-product attention to a learned key for each position, without 1/√d_k. Any backend computes it, and scores "
        "have rank d_k + 1 at most. Mixhead B reads the features. `--synthesizer-heads 1` has one W_2 for all heads. "
        "`lowrank_synthesizer_lm_wiki103`, one reading of the Mixhead paper's 248M, uses it. This model also keeps an unused projection of "
        "keys (`--unused-key-projection`); without it, it has 231.2M. A sentence of more than n positions is refused. Padding does not count "
        "as a position, and decoding caches only values. It does not work with cross attention, appended keys, SKV, EL or head embeddings. "
        "Counted with n 512, which in fairseq is `--max-target-positions` or `--max-source-positions`.",
        "mha",
        {"score": "synthesizer-dense"},
    ),
    "synthesizer-random": Variant(
        "The random Synthesizer: a learned matrix for each head",
        "S_i[t, s] = R_i[t, s],   R_i: n × n for a greatest length n, learned, from a normal distribution of variance 1/n",
        "2·d·h·d_k + h·n²",
        "h·d_k",
        ("synthesizer",),
        "There are neither queries nor keys. The pattern of a position is the same in every sentence, and its scores can have any rank. Mixhead "
        "B reads queries, so it is refused. If no sentence has padding on its left, the memory is that of R. The rest is as in "
        "`synthesizer-dense`.",
        "mha",
        {"score": "synthesizer-random"},
    ),
    "low-rank-embeddings": Variant(
        "Low-rank input embeddings",
        "E = A C,   A: V × r, C: r × d (rank r at most; the output matrix stays full and untied)",
        "V·r + r·d",
        None,
        ("vocabulary_bottleneck",),
        "The vocabulary bottleneck: if r < d, width beyond r is worth little, and depth is worth more. It works for language models with any "
        "attention. A full embedding has V·d parameters. With --embed-kernel K, a position reads the last K tokens by a convolution, with "
        "K·r·d parameters instead of r·d. Its rank is K·r at most. These are the paper's equations 2 and 4, with a stride of one token.",
        None,
    ),
}
"""The variants by the names of their pages; every preset has an entry."""


@dataclass(frozen=True)
class ResultQuery:
    """A query for the results of a variant in one table of this repository.

    Args:
        title: the setting and the measure.
        file: the file of results.
        table: the table in the file.
        row: the name of the row, with ``{name}`` for the variant.
        style: the format of a value.
        geometric: if True, the mean is geometric, for values of several orders of magnitude.
        split: the split whose loss in bits is used; ``None`` for a line's own value.
        task: the task of the lines, if they have one.
    """

    title: str
    file: str
    table: str
    row: str
    style: str = ".2f"
    geometric: bool = False
    split: str | None = None
    task: str | None = None

    def value(self, line: dict) -> float | None:
        """Return the value of a line of results, if it has one."""
        return line["value"] if self.split is None else line.get("losses", {}).get(self.split, {}).get("bits")

    def format_values(self, values: Sequence[float]) -> str:
        """Return mean and standard deviation; for a geometric mean, the least and the greatest value."""
        mean = format((geometric_mean if self.geometric else fmean)(values), self.style)
        if len(values) == 1:
            return mean
        if self.geometric:
            return f"{mean} ({min(values):{self.style}} to {max(values):{self.style}})"
        return f"{mean} ± {stdev(values):{self.style}}"


_TRANSLATION = (
    ("Multi30k de-en, 4 heads of 32", "fast-start", "h4-{name}-2e-3"),
    ("Multi30k de-en, 32 heads of 4", "fast-start", "h32-{name}-2e-3"),
    ("Multi30k, four sentences as one, 4 heads of 32", "above-head-size", "h4-{name}"),
    ("Multi30k, four sentences as one, 32 heads of 4", "above-head-size", "h32-{name}"),
)
RESULT_QUERIES = (
    *(ResultQuery(f"{title}: BLEU ↑", "evidence.jsonl", table, row) for title, table, row in _TRANSLATION),
    *(
        ResultQuery(f"{title}: test loss, bits ↓", "evidence.jsonl", table, row, ".3f", split="test")
        for title, table, row in _TRANSLATION
    ),
    ResultQuery(
        "one known matrix, 16 heads: error ↓",
        "evidence-matrices.jsonl",
        "matrices",
        "n16-shared-h16-{name}",
        ".2g",
        True,
    ),
    ResultQuery(
        "eight known matrices, 16 heads: error ↓",
        "evidence-matrices.jsonl",
        "matrices",
        "n16-own-h16-{name}",
        ".2g",
        True,
    ),
    ResultQuery(
        "nearest point, 8 heads: squared error ↓", "evidence-nearest-point.jsonl", "nearest-point", "h8-{name}", ".3f"
    ),
    ResultQuery(
        "small BERT, sentence polarity: accuracy ↑", "brown.jsonl", "fine-tuning", "{name}", task="sentence-polarity"
    ),
    ResultQuery("Multi30k de-en, 4 heads of 64: BLEU ↑", "multi30k.jsonl", "compare", "{name}"),
    ResultQuery("Multi30k de-en, 32 heads of 8: BLEU ↑", "multi30k.jsonl", "compare", "{name}-h32"),
    ResultQuery("Brown, 4 heads: test perplexity ↓", "brown.jsonl", "compare", "{name}"),
    ResultQuery("Brown, 32 heads: test perplexity ↓", "brown.jsonl", "compare", "{name}-h32"),
)


def evaluate(formula: str, sizes: dict[str, int]) -> int:
    """Return the value of a sum of products of numbers and sizes, such as ``4·d·h·d_k + h²``.

    Args:
        sizes: the sizes by name.

    Raises:
        KeyError: a name has no size.
    """

    def value(factor: str) -> int:
        base = factor.removesuffix("²")
        return (int(base) if base.isdecimal() else sizes[base]) ** (2 if factor.endswith("²") else 1)

    return sum(math.prod(value(factor) for factor in term.split("·")) for term in formula.split(" + "))


def build_layer(variant: Variant, embed_dim: int = EMBED_DIM, heads: int = HEADS) -> MultiheadAttention:
    """Build a layer of the variant, without biases and on the meta device."""
    sizes = {"embed_dim": embed_dim, "num_heads": heads, "max_positions": POSITIONS}
    layer = build_attention(variant.preset, **sizes, self_attention=True, bias=False, device="meta", **variant.axes)
    return layer.eval()


def sizes_of(layer: MultiheadAttention) -> dict[str, int]:
    """Return the sizes of a layer by the letters of the formulas."""
    sizes = layer.projection.dims
    return {
        "d": sizes.embed_dim,
        "h": sizes.num_heads,
        "d_k": sizes.head_dim,
        "g": sizes.key_value_heads or sizes.num_heads,
        "n": POSITIONS,
        "r": getattr(layer.projection, "rank", layer.spec.factor_rank or DEFAULT_RANK),
        "r_q": getattr(layer.projection, "query_rank", 0),
        "D": getattr(layer.projection, "shared_dim", 0),
    }


def count(layer: MultiheadAttention) -> int:
    """Count the parameters of a layer."""
    return sum(parameter.numel() for parameter in layer.parameters())


@torch.no_grad()
def cached(layer: MultiheadAttention) -> int:
    """Decode one token, and return the number of values that the layer caches."""
    state = {}
    token = torch.empty(1, 1, layer.embed_dim, device="meta")
    layer(token, token, token, incremental_state=state, need_weights=False)
    return sum(tensor.numel() for saved in state.values() for tensor in saved.tensors.values())


def flags(variant: Variant) -> str:
    """Return the flags that choose the variant, and the axes that its preset sets."""
    if variant.preset is None:
        return "`--embed-rank R`, `--embed-kernel K`, or both"
    own, of_preset = (
        "".join(
            f" --{AXES[axis].flag.replace('_', '-')} {'N' if AXES[axis].type is int else value}"
            for axis, value in axes.items()
        )
        for axes in (variant.axes, PRESETS[variant.preset])
    )
    if variant.preset == "mha" and own:
        return f"`{own.strip()}`, with any `--attention`"
    text = f"`--attention {variant.preset}{own}`"
    return f"{text}, which is `--attention mha{of_preset}{own}`" if of_preset else text


def code(variant: Variant) -> list[Path]:
    """Return the files of the variant's special parts, relative to the package."""
    if variant.preset is None:
        return [Path("plugin/attention.py")]
    layer = build_layer(variant)
    spec, plain = layer.spec, AttentionSpec()
    parts = []
    if layer.mixing is not None:
        queries = torch.empty(1, layer.num_heads, 1, layer.head_dim, device="meta")
        inputs = torch.empty(1, 1, layer.embed_dim, device="meta")
        parts += [layer.mixing, layer.mixing.operation(queries, inputs)]
    parts += [part for part in (layer.head_map, layer.head_output) if part is not None]
    if spec.score != plain.score:
        parts.append(layer.score)
    if spec.activation != plain.activation:
        parts.append(ACTIVATIONS[spec.activation])
    if spec.projection != plain.projection or not parts:
        parts.insert(0, layer.projection)
    return list(dict.fromkeys(Path(inspect.getfile(type(part))).relative_to(PACKAGE) for part in parts))


def read_lines(file: Path) -> list[dict]:
    """Return the lines of a results file: trainings and measurements."""
    return read_results(file, measurements=True)


def measured(name: str, results: Path = RESULTS, read: Callable[[Path], list[dict]] = read_lines) -> list[dict]:
    """Return a variant's rows in our results, with those of ``mha`` for the same seeds.

    ``read`` reads a file. Each row has ``setting``, ``value``, ``mha`` (empty for `mha`, or without a common seed) and ``seeds``.
    """
    rows = []
    for query in RESULT_QUERIES:
        lines = [
            line
            for line in read(results / query.file)
            if line["table"] == query.table and line.get("task") == query.task
        ]

        def by_seed(preset: str, query: ResultQuery = query, lines: list[dict] = lines) -> dict[int, float]:
            row = query.row.format(name=preset)
            found = {line["seed"]: query.value(line) for line in lines if line["row"] == row and not line["smoke"]}
            return {seed: value for seed, value in sorted(found.items()) if value is not None}

        own, plain = by_seed(name), by_seed("mha") if name != "mha" else {}
        seeds = [seed for seed in own if seed in plain] or list(own)
        if seeds:
            texts = (
                query.format_values([of[seed] for seed in seeds]) if set(seeds) <= of.keys() else ""
                for of in (own, plain)
            )
            rows.append(dict(zip(("setting", "value", "mha"), (query.title, *texts), strict=True), seeds=len(seeds)))
    return sorted(rows, key=lambda row: row["seeds"] == 1)


def results_table(name: str, rows: list[dict]) -> str:
    """Return the Markdown table of :func:`measured`."""
    columns = ["", f"`{name}`", *(["`mha`"] if name != "mha" else []), "seeds"]
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        seeds = "one" if row["seeds"] == 1 else str(row["seeds"])
        lines.append([row["setting"], row["value"], *([row["mha"]] if name != "mha" else []), seeds])
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    notes = "Mean ± standard deviation over seeds; errors of known matrices: geometric mean (least to greatest).\n"
    if any(row["seeds"] == 1 for row in rows):
        notes += (
            "A row with one seed says little: two runs of one function differ by 0.99 BLEU "
            "([results.md](../results.md#multi30k-german-to-english)).\n"
        )
    return f"{notes}\n{table}"


def citations(variant: Variant) -> str:
    """Return links to the papers of a variant, or "this project"."""
    ours = load_papers()
    papers = PAPERS | {key: (of["title"], f"{of['authors']}, {of['published']}", of["url"]) for key, of in ours.items()}
    cited = (papers[key] for key in variant.papers)
    return "; ".join(f"[{title}]({url}) ({authors})" for title, authors, url in cited) or "this project"


def costs(variant: Variant) -> dict[str, str]:
    """Return parameters and cache, as formulas with the numbers of a built layer."""
    if variant.preset is None:
        sizes = {"V": VOCABULARY, "r": EMBED_RANK, "d": EMBED_DIM}
        number = evaluate(variant.parameters, sizes)
        full = evaluate("V·d", sizes)
        return {
            "parameters": variant.parameters,
            "counted": f"{number:,} with V {VOCABULARY:,}, r {EMBED_RANK}, d {EMBED_DIM} (full: {full:,})",
            "cached": "nothing: no attention",
        }
    layer, plain = build_layer(variant), build_layer(VARIANTS["mha"])
    more = count(layer) - count(plain)
    return {
        "parameters": variant.parameters,
        "counted": f"{count(layer):,}" + (f" ({more:+,} to `mha`)".replace("-", "−") if more else ""),
        "cached": f"{variant.cached} = {cached(layer):,}",
    }


def class_of(name: str) -> str:
    """Return the class of a variant with the test that proves it; only presets have one."""
    if name not in PRESET_CLASSES:
        return "not classified"
    kind = PRESET_CLASSES[name]
    limit = " without its norm" if name == "mla" else ""
    return f"{kind}{limit} (`{CLASS_TESTS[kind]}`)"


def page(name: str, results: Path = RESULTS, read: Callable[[Path], list[dict]] = read_lines) -> str:
    """Return the page of a variant, in Markdown."""
    variant = VARIANTS[name]
    cost = costs(variant)
    files = ", ".join(f"[{file}](../../fairseq_lowrank/{file})" for file in code(variant))
    counted = "Counted" if variant.preset is None else f"Counted on a layer of d {EMBED_DIM}, h {HEADS}, without biases"
    rows = measured(name, results, read)
    missing = "None yet.\n" if Path(results).exists() else f"No results here: {results} does not exist.\n"
    table = results_table(name, rows) if rows else missing
    formula = "".join(f"    {line}\n" for line in variant.formula.splitlines())
    return (
        f"# {variant.title} (`{name}`)\n\n{formula}\n"
        "| | |\n| --- | --- |\n"
        f"| Parameters | {cost['parameters']} |\n"
        f"| {counted} | {cost['counted']} |\n"
        f"| Numbers cached per token | {cost['cached']} |\n"
        f"| Class | {class_of(name)} |\n"
        f"| Flags | {flags(variant)} |\n"
        f"| Code | {files} |\n"
        f"| Paper | {citations(variant)} |\n\n"
        f"{variant.notes}\n\n## Measured here\n\n{table}"
    )


def index() -> str:
    """Return the table of all variants, in Markdown."""
    rows = "".join(
        f"| [{name}]({name}.md) | {variant.title} | {class_of(name)} | {cost['parameters']} | {cost['counted']} | {cost['cached']} |\n"
        for name, variant in VARIANTS.items()
        for cost in (costs(variant),)
    )
    classes = "".join(f"- **{name}**: {meaning}.\n" for name, meaning in CLASSES.items())
    return (
        "# Variants\n\n"
        "Each variant has a page with its formula, costs, flags, code, paper and our measurements. "
        "`python -m experiments variants --output docs/variants` writes the pages.\n"
        f"The numbers are counted on a layer of d {EMBED_DIM} and h {HEADS} without biases, after it has decoded one token.\n\n"
        "Letters:\n\n- d is the embedding size, h the number of heads, d_k the head size.\n"
        "- g is the number of heads of keys and values.\n"
        f"- n is the greatest length, counted with {POSITIONS}.\n"
        "- r is a rank or the size of a latent, r_q the rank of queries.\n"
        "- D is the size of queries and keys that heads share.\n\n"
        "[results.md](../results.md) and [evidence.md](../evidence.md) put the measurements in context.\n\n"
        "## What a method can add\n\n"
        "Compared with plain attention of the same heads and head size, each preset belongs to one class.\n"
        "A test in [tests/attention/test_class.py](../../tests/attention/test_class.py) proves it. The column has the name of the test.\n\n"
        f"{classes}\n"
        "Two cells need an explanation. `mla` is restricted only without its norm, because the norm depends on the input. "
        "`diff` is OV because its factor depends on the query. With a constant factor it equals plain attention of twice the heads "
        "(`test_difference_with_a_constant_factor_is_plain_attention_of_twice_the_heads`).\n\n"
        "| variant | | class | parameters | counted | cached per token |\n| --- | --- | --- | --- | --- | --- |\n"
        f"{rows}"
    )


def pages(results: Path = RESULTS, names: Sequence[str] = ()) -> dict[str, str]:
    """Return the pages of variants by file name; without names every page and the index."""
    read = functools.cache(read_lines)  # every page takes rows from all files
    start = {} if names else {"README.md": index()}
    return start | {f"{name}.md": page(name, results, read) for name in names or VARIANTS}
