"""The texts of the pages of methods, in addition to what a method declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Page:
    """What the page of a method says.

    Args:
        notes: exact properties, and what to know before choosing the method.
        advice: what the method is for, as sentences.
        kind_limit: a limit of the class, in words.
        sizes: sizes with which the page counts a layer of d 512 and 8 heads.
        controls: the rows of ``mha`` in our results that have as many parameters, with their labels.
        on: the method on whose page this one is described, if it has no page.
    """

    notes: str
    advice: str
    kind_limit: str = ""
    sizes: Mapping[str, int | str] = field(default_factory=dict)
    controls: Mapping[str, str] = field(default_factory=dict)
    on: str = ""


PAGES: dict[str, Page] = {
    "alibi": Page(
        notes=(
            "Each head lowers scores by the distance of query and key, at its own fixed rate. The bias is added after masks "
            "are chosen and before the softmax, and its memory is linear. Models with it usually have no position embeddings: "
            "in fairseq add `--no-token-positional-embeddings`. Cross attention has no distances: with an encoder and a "
            "decoder, add `--attention-sites encoder,decoder`. If h is no power of two, the slopes follow the authors' code."
        ),
        advice="Use it if the model must read longer texts than those that it was trained on.",
    ),
    "sinks": Page(
        notes=(
            "One learned score for each head joins the denominator of the softmax. So the output of a head is that of `mha` "
            "times a number below 1 that depends on the query. It does not equal `mha` at first. Memory is linear. PyTorch's "
            "fused kernels and the Triton kernels cannot compute it, so `auto` takes blocks."
        ),
        advice="Its authors propose it for heads that put weight on tokens without meaning, such as the first one.",
    ),
    "t5-bias": Page(
        notes=(
            "Each head learns a number for each of b ranges of distances. At first it equals `mha`. Each layer has its own "
            "numbers; T5 shares those of its first layer. Scores keep their factor 1/√d_k, which T5 leaves out. Cross "
            "attention has no distances: with an encoder and a decoder, add `--attention-sites encoder,decoder`. A decoder "
            "alone can use `--bucket-sides past`."
        ),
        advice="Use it if heads should learn how much the distance of a key matters.",
    ),
    "collaborative": Page(
        notes=(
            "All heads share D features, and each head weights them. With D = h·d_k, the default, it can be every "
            "plain attention; `fairseq-lowrank convert` does this exactly. With D > d_k the scores of a head can have "
            "rank D. Counted with D 256."
        ),
        advice="Use it to compress a trained model whose heads learned much in common: `convert` factors it.",
        sizes={"shared_dim": 256},
    ),
    "dcmha": Page(
        notes=(
            "The query-wise part of DCMHA, before and after the softmax. At first it equals `mha`. The matrices are "
            "computed from the layer's input, so `--mixing-orthogonality` is refused. Counted with rank r = 2, the "
            "default (`--rank`)."
        ),
        advice="Use it if you want the strongest mixing and accept its cost.",
    ),
    "diff": Page(
        notes=(
            "Two heads of queries share the key and value of head i, as in the authors' second version. There are 2h "
            "heads of queries, so queries have twice the parameters. It does not equal `mha` at first. "
            "`--load-alignments` refuses it, because its weights can be negative. With a constant factor it is plain "
            "attention of 2h heads. `--diff-version 1` is the first version: keys are doubled too, λ is learned for a layer "
            "from λ_init = 0.8 − 0.6·exp(−0.3·(depth − 1)), and heads are normalised. It has 6·d·h·d_k + 5·d_k parameters "
            "and caches 3·h·d_k numbers a token. The paper has heads of d/2h with values of twice this size: "
            "`--head-dim 32 --value-dim 64` for d 512 and 8 heads."
        ),
        advice="Its authors propose it against attention to irrelevant tokens.",
    ),
    "el": Page(
        notes=(
            "Keys and values are the hidden states, divided among heads, as the MHE poster defines it. So d_k = d/h, "
            "and h·d_k = d numbers are cached."
        ),
        advice="Use it if memory of generation is too large. It has half the parameters of `mha`.",
    ),
    "gated-head": Page(
        notes=(
            "Each query weights each head's output by a number between 0 and 2. At first it equals `mha`. "
            "`--gate-start half` gives σ as published, which halves the outputs at first. A smaller initial output can "
            "speed up training by itself, so compare both."
        ),
        advice="Use it to let queries switch heads off, for few parameters.",
    ),
    "gated": Page(
        notes=(
            "Each query weights each feature of each head's output. At first it equals `mha`. `--gate-start half` "
            "gives σ as published, which halves the outputs at first."
        ),
        advice="Use it for a gate on each feature. It costs a quarter more attention parameters.",
    ),
    "mhe-add": Page(
        notes=(
            "It is exactly multi-query attention. e^k_i adds (q + e^q_i)·e^k_i/√d_k to an entire row, and softmax "
            "cancels this. (Sigsoftmax does not, and softmax with an appended key of zeros does not.) e^v_i adds e^v_i "
            "times the sum of the row. So one key and one value are projected, cached and read. All heads share a "
            "value of size d_k, which limits the rank of the output."
        ),
        advice="Use it if attention has too many parameters and a few percent of quality may go.",
    ),
    "mhe-mul": Page(
        notes=(
            "It is exactly multi-query attention. The query absorbs (1 + e^q_i)(1 + e^k_i), there is one key and one "
            "value, and head i's output is multiplied by (1 + e^v_i). All heads share a value of size d_k, which "
            "limits the rank of the output."
        ),
        advice="Use it if attention has too many parameters and a few percent of quality may go.",
        controls={"mha-narrow": "`mha`, narrower feed-forward layer"},
    ),
    "knocking-linear": Page(
        notes=(
            "The projections absorb the maps, so it can compute the same as `mha`. `fairseq-lowrank convert` folds "
            "them. "
        ),
        advice="A control: it computes what plain attention computes, but trains differently.",
    ),
    "lrkv": Page(
        notes=(
            "All heads share one key and one value, and each adds a difference of rank r. r = 0 would be `mqa`. With r "
            "= d_k it can be every plain attention, and `fairseq-lowrank convert` does this exactly. The query and the "
            "output absorb B_i. Counted with r = d_k/4, the default (`--rank`)."
        ),
        advice="Use it if `mqa` loses too much and `gqa` caches too much.",
    ),
    "mea": Page(
        notes=(
            "The projections absorb the maps, so it can compute the same as `mha`. `fairseq-lowrank convert` folds "
            "them. "
        ),
        advice="A control: it computes what plain attention computes, but trains differently.",
    ),
    "headmix": Page(
        notes=(
            "The projections absorb the maps, so it can compute the same as `mha`. `fairseq-lowrank convert` folds "
            "them. A public record for training on little data multiplies W_Q, W_K and W_V by such matrices, at "
            "another rate (`--mixing-lr-scale`). "
        ),
        advice="A control: it computes what plain attention computes, but trains differently.",
    ),
    "mfa": Page(
        notes=(
            "All heads share one key and one value, so heads can be wide (`--head-dim`) with a small cache. Here d_k "
            "is the head size and r the size of the latent (`--latent-dim`). Counted with d_k 128 and r 256. The known "
            "matrices were learned with d_k 64, and the nearest point with d_k 32."
        ),
        advice="Use it for scores of high rank and a small cache.",
        sizes={"head_dim": 128, "latent_dim": 256},
    ),
    "mixhead-a": Page(
        notes=(
            "Mixing after the softmax leaves each pattern P_j as it is. It widens the map from values to outputs, "
            "whose rank becomes min(d, h·d_k). The reason: Σ_i Σ_j M[j, i] P_j V_i W_O,i = Σ_j P_j (Σ_i M[j, i] V_i "
            "W_O,i). If all heads share one value (`mqa`, `sha`, `mhe-mul`), the output projection absorbs M."
        ),
        advice="Use it if small heads need one pattern in common, and train `gain` with it.",
    ),
    "mixhead-b": Page(
        notes=(
            "q_{t,j} is head j's query after a head embedding, if there is one, and before the scale 1/√d_k. With W^M "
            "= 0 it is Mixhead A. No fixed output projection absorbs it."
        ),
        advice="Use it to repeat the paper: both Mixheads are rows of its tables.",
    ),
    "mixhead-random": Page(
        notes=(
            "An ablation: mixing that is not learned. Columns are divided by their sums (eq. 13), as in the authors' "
            "released code. M is saved with the model (h² numbers, which are not parameters)."
        ),
        advice="A control for *learned* mixing: its matrix is fixed.",
    ),
    "avghead": Page(
        on="mixhead-random",
        notes=(
            "An ablation: all heads have the same pattern, and only their values differ. M is 1/h and never trained, "
            'which is our reading of the paper\'s "uniform". It is saved with the model (h² numbers, which are not '
            "parameters)."
        ),
        advice="A control for *learned* mixing: its matrix is fixed.",
    ),
    "gain": Page(
        notes=(
            "The control for every claim on mixing: only the diagonal of M. The output projection absorbs it exactly: "
            "w_i P_i V_i W_O,i = P_i V_i (w_i W_O,i). So it can express the same as `mha`, and differs only in "
            "training. Fairseq's `--scale-heads` scales slices of the projected output instead, and only in decoders."
        ),
        advice="Train it next to each kind of mixing: it can damp heads and cannot mix them.",
    ),
    "mla": Page(
        kind_limit="without its norm and rotary features",
        notes=(
            "A token caches r numbers. For few queries, the query absorbs W^k and the output absorbs W^v, so c is the "
            "one key and value of all heads. Except for its norm, it is plain attention with factored weights. Keys "
            "and values need one input, and scores are dot products. With `--rotary-dim`, as in DeepSeek-V2, e features of "
            "queries and one key for all heads carry rotary positions, for self-attention alone. Counted with r = d/2, the "
            "default, and e = 0."
        ),
        advice="Use it if the cache is too large and `gqa` loses too much.",
    ),
    "sha": Page(
        notes=("The base of MHE, and the unit of PEoP. All heads are equal, so mixing them only scales each head."),
        advice="The smallest baseline, in which all heads are one.",
    ),
    "mqa": Page(
        notes=(
            "It is `gqa` with one head of keys and values. With one shared value, mixing probabilities equals mixing "
            "head outputs: P̄_i V = Σ_j M[j, i] (P_j V). So the output projection absorbs a static M."
        ),
        advice="Use it if the cache must be as small as sharing makes it.",
    ),
    "relative": Page(
        notes=(
            "Positions are distances, so memory of earlier segments can precede the keys. Nothing of size n × n is "
            "stored. W_R has the same number of heads as keys. A key embedding (MHE) changes only k_s, and Mixhead B "
            "reads q_t. The term of positions is not limited by the rank of the keys, so the scores of a head can "
            "exceed rank d_k. Use it for self-attention only, with separate keys and without appended ones."
        ),
        advice="Use it to train a Transformer-XL.",
    ),
    "score-gain": Page(
        notes=(
            "The twin of `gain` before the softmax: a temperature of each head, only the diagonal of L. The projection "
            "of queries absorbs it exactly: a_i Q_i = x (a_i W_Q,i). So it can express the same as `mha`, and differs "
            "only in training. Masks and biases are added to the multiplied scores. `--mixing-lr-scale` sets its rate."
        ),
        advice="Train it next to each mixing of scores: it can sharpen heads and cannot mix them.",
    ),
    "skv": Page(
        notes=("Half the cache of `mha`, because only keys are cached. The value input must be the key input."),
        advice="Use it for half the cache, if keys and values may be the same.",
    ),
    "sigsoftmax": Page(
        notes=(
            "Log-probabilities are not the scores minus a constant in each row, so their rank can exceed that of the "
            "scores. It is not invariant under a shift of a row, so a constant in a row has an effect. It is an "
            "activation, so it works with every method."
        ),
        advice="Use it if the rank of log-probabilities should exceed that of scores. Where we measured, it did not lower the error.",
    ),
    "mha": Page(
        notes=(
            "The scores of a head have rank d_k at most. This is the low-rank bottleneck. With positions of full rank, "
            "a head of size n − 1 can make any positive pattern over n positions, because softmax ignores a constant "
            "in each row. A causal mask leaves half of the scores free. Then a head of size (n − 1)/2 can make almost "
            "any pattern: all except a set of measure zero. For example, with n 3 and d_k 1 it cannot make the rows "
            "(0.7, 0.3) and (0.4, 0.4, 0.2). `mha` equals fairseq's own module, number for number, and loads its "
            "checkpoints."
        ),
        advice="The baseline: plain attention through the same code.",
    ),
    "fixedhead": Page(
        notes=(
            "Theorem 1 of the paper: with positions of full rank and d_k ≥ n, a head can make any positive "
            "row-stochastic n × n matrix. With some smaller d_k it cannot. Beyond the paper: n − 1 is enough, because "
            "softmax ignores a constant in each row. For almost every causal pattern, (n − 1)/2 is enough. The cache "
            "grows with the head size too. Counted with heads of 128."
        ),
        advice="Use it if scores need a higher rank, and parameters and cache may grow with the head size.",
        sizes={"head_dim": 128},
        controls={"mha-wide": "`mha`, wider feed-forward layer", "mha-more-heads": "`mha`, more small heads"},
    ),
    "gqa": Page(
        notes=(
            "g = h is `mha`, and g = 1 is `mqa`. It saves cache, and parameters of keys and values. The rank of a "
            "head's scores stays d_k. Counted with two heads of keys and values."
        ),
        advice="Use it if the cache of decoding is too large and quality must stay close to `mha`.",
        sizes={"key_value_heads": 2},
    ),
    "structured": Page(
        notes=(
            "Scores have rank d, with O(d^1.5) parameters for each head instead of d². The price is time and cache: "
            "products with keys grow by d / d_k, and a token caches its input of size d next to its values. The head "
            "size sets values alone. The paper maps keys instead of queries, so that each head has keys of size d; "
            "here all heads share one key. Its layer norm subtracts the mean, so all heads lose one direction of the "
            "keys. Here queries and keys are divided by their root mean square. Counted with c = √d, the divisor of d "
            "nearest to it."
        ),
        advice="Use it if scores must have full rank and parameters are few. On a CPU it takes about three times as long.",
    ),
    "synthesizer-dense": Page(
        notes=(
            "W_1 is q_proj, and there are no keys. Column s of W_2 acts like a key for the features ReLU(x_t W_1), but "
            "it is the same in every sentence. So this is dot-product attention to a learned key for each position, "
            "without 1/√d_k. Any backend computes it, and scores have rank d_k + 1 at most. Mixhead B reads the "
            "features. `--synthesizer-heads 1` has one W_2 for all heads. `lowrank_synthesizer_lm_wiki103`, one "
            "reading of the Mixhead paper's 248M, uses it. This model also keeps an unused projection of keys "
            "(`--unused-key-projection`); without it, it has 231.2M. A sentence of more than n positions is refused. "
            "Padding does not count as a position, and decoding caches only values. Use it for "
            "self-attention only, without appended keys, SKV, EL or head embeddings. Counted with n 512, which in "
            "fairseq is `--max-target-positions` or `--max-source-positions`."
        ),
        advice="Use it to repeat the Synthesizer: scores without keys.",
    ),
    "synthesizer-random": Page(
        notes=(
            "There are neither queries nor keys. The pattern of a position is the same in every sentence, and its "
            "scores can have any rank. Mixhead B reads queries, so it is refused. If no sentence has padding on its "
            "left, the memory is that of R. The rest is as in `synthesizer-dense`."
        ),
        advice="Use it to repeat the Synthesizer: scores without keys.",
    ),
    "talking-heads": Page(
        notes=(
            "Mixing before the softmax raises the rank of the scores, which is the bottleneck: Σ_j L[j, i] Q_j K_jᵀ "
            "has rank min(d, h·d_k). Mixing after the softmax widens the map from values to outputs, as in Mixhead A. "
            "Masks and biases are added to the mixed scores, so a −∞ is never mixed."
        ),
        advice="Use it if scores need a higher rank with the same heads.",
    ),
    "score-mixing": Page(
        notes=(
            "The first half of talking heads: Σ_j L[j, i] Q_j K_jᵀ has rank min(d, h·d_k), and values stay each head's "
            "own. Masks and biases are added to the mixed scores, so a −∞ is never mixed. Its control is `score-gain`."
        ),
        advice="Use it if small heads limit the scores: it is the cheapest repair that was measured here.",
    ),
    "tpa": Page(
        notes=(
            "Queries, keys and values are quadratic in the input, so scores are not bilinear in the inputs of queries "
            "and keys. A token caches the factors. The projections have no bias. Counted with r = 2 (`--rank`) and r_q "
            "= 6 (`--query-rank`), the defaults."
        ),
        advice="Use it if both parameters and cache must be small.",
    ),
    "xsa": Page(
        notes=(
            "A head removes the direction of the value at the same position, which the residual connection already "
            "carries. At first it equals `mha`. Cross attention has no own value: with an encoder and a decoder, add "
            "`--attention-sites encoder,decoder`."
        ),
        advice="Use it if attention should carry only what the position does not have itself.",
    ),
    "thin-keys": Page(
        notes=(
            "It is no value of `--attention`: the two flags are all that it sets. The paper's numbers: keys of a quarter of "
            "the width lose 4.3 % of perplexity at small scale and nothing at 7B parameters; GPT-2 and Mistral cut to a quarter "
            "and refitted lose 2 %. `test_thin_keys_are_plain_attention_with_rows_of_zeros` proves the class. From a trained "
            "model: `fairseq-lowrank measure CKPT` says what its heads use, `fairseq-lowrank convert CKPT --head-dim 16 --data "
            "DATA --output narrow.pt` keeps the best directions and says what they cost, and `fairseq-train "
            "--finetune-from-model narrow.pt --head-dim 16 --value-dim 64` trains further. Train a control of the full size as "
            "long. In PyTorch `fairseq_lowrank.tools.narrowing.narrow_heads` does the same. Rotary positions are refused. Counted "
            "with queries and keys of 16."
        ),
        advice="Use it if the cache is too large and heads do not need all their directions.",
        sizes={"head_dim": 16, "value_dim": 64},
    ),
    "low-rank-embeddings": Page(
        notes=(
            "The vocabulary bottleneck: if r < d, width beyond r is worth little, and depth is worth more. It works for language models with "
            "any attention. A full embedding has V·d parameters. With --embed-kernel K, a position reads the last K tokens by a convolution, "
            "with K·r·d parameters instead of r·d. Its rank is K·r at most. These are the paper's equations 2 and 4, with a stride of one token."
        ),
        advice="Use it if the vocabulary is large and depth matters more than width.",
    ),
}
"""The page of each method, by its name."""
