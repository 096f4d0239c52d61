#!/usr/bin/env bash
# What: An inner attention width of 1, 2, 4, 8 and 16 times the model's, with 30M to 70M parameters at depths 12, 18 and 24.
# Table: Vocabulary bottleneck paper, figure 4 (§5.3).
# Result: Losses on validation and test set. The best depth counts.
# Time: 75 trainings, about 1,900 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: Heads of 16, more of them for a greater width, and 2,000 subwords. Our text of the paper names neither.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=vocabulary_bottleneck TABLE="fig4$OTHER_POSITIONS" CORPUS=wikitext-103-bpe2000
for ratio in 1 2 4 8 16; do
    for depth in 12 18 24; do
        for millions in 30 40 50 60 70; do
            # L layers have L·(8 + 4·ratio)·d² weights, input and output 2·2000·d; d is the nearest multiple of 16.
            d=$(awk "BEGIN { layers = $depth * (8 + 4 * $ratio)
                print 16 * int((sqrt(2000 ^ 2 + layers * $millions * 1e6) - 2000) / layers / 16 + 0.5) }")
            row ratio$ratio-l$depth-${millions}m --decoder-layers $depth $(lm_width $d) \
                --decoder-ffn-embed-dim $((4 * d)) --attention fixedhead --head-dim 16 \
                --decoder-attention-heads $((ratio * d / 16))
        done
    done
done
COMMON=("${VOCABULARY_LM[@]}")
loss_on_blocks
