#!/usr/bin/env bash
# What: Depth 12: either the rank of the input embedding shrinks (d 680, about 70M parameters), or the width does (50M to 75M).
# Table: Vocabulary bottleneck paper, figure 2 (§5.1).
# Result: Losses on validation and test set.
# Time: 11 trainings, about 280 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: A vocabulary of 2,000, which the paper does not name. It makes 70M parameters at d 680.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=vocabulary_bottleneck TABLE="fig2$OTHER_POSITIONS" CORPUS=wikitext-103-bpe2000
for rank in 16 32 64 128 256 512; do
    row r$rank-d680 $(lm_width 680) --decoder-ffn-embed-dim 2720 --embed-rank $rank
done
for d in 576 608 640 680 704; do
    row full-d$d $(lm_width $d) --decoder-ffn-embed-dim $((4 * d))
done
COMMON=("${VOCABULARY_LM[@]}" --decoder-layers 12 --decoder-attention-heads 8)
loss_on_blocks
