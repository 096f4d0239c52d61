#!/usr/bin/env bash
# What: LM1B in 32k subwords, n 256, 6 layers, d 256. Part (a) has more heads, and part (b) compares head sizes with numbers of
#   heads.
# Table: Fixed multi-head attention paper, figure 3 (§4.3).
# Result: The sizes of all models, then perplexities of a subword as in figure 1.
# Time: 24 trainings, about 180 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: The sizes of (b), and the steps of (a). In (a) the baseline's feed-forward layers grow to the size of the model
#   with fixed head size 32.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=fixedhead TABLE=fig3 CORPUS=lm1b-all-heldout-bpe32000
for h in 8 16 32 64; do
    # Fixed heads of size 32 have 4·256·(32·h − 256) more attention weights, which 2·256 a unit of feed-forward matches.
    row a-h$h-mha --arch lowrank_transformer_lm_lm1b_small --attention mha --decoder-attention-heads $h \
        --head-dim $((256 / h)) --decoder-ffn-embed-dim $((1024 + 2 * (32 * h - 256)))
    row a-h$h-fixedhead --arch lowrank_transformer_lm_lm1b_small --attention fixedhead --decoder-attention-heads $h
done
for size in 16 32 64 128; do
    for h in 4 8 16 32; do
        row b-dk$size-h$h-fixedhead --arch lowrank_transformer_lm_lm1b_small --attention fixedhead --head-dim $size \
            --decoder-attention-heads $h
    done
done
COMMON=("${LM1B_SMALL[@]}") EVALUATE="${LM1B_EXAMPLES[*]} --context-window 0 ${EVALUATE:-}"
language_model_sizes
language_model_rows
