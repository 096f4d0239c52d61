#!/usr/bin/env bash
# What: Figure 1 with 2,000 subwords and an input embedding of rank 500.
# Table: Vocabulary bottleneck paper, figure 3 (§5.2.2).
# Result: Losses on validation and test set. Models no wider than 500 are figure 1's own.
# Time: 8 trainings, about 200 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: Those of fig1.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=vocabulary_bottleneck TABLE="fig3$OTHER_POSITIONS" CORPUS=wikitext-103-bpe2000

# size DEPTH WIDTH
size() {
    row l$1-d$2 --decoder-layers $1 $(lm_width $2) --decoder-ffn-embed-dim $((4 * $2)) \
        $([ "$2" -le 500 ] || echo --embed-rank 500)
}
for d in 288 408 504 608; do size 24 $d; done
for d in 200 288 360 432; do size 48 $d; done
COMMON=("${VOCABULARY_LM[@]}" --decoder-attention-heads 8)
loss_on_blocks
