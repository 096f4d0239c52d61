#!/usr/bin/env bash
# Vocabulary bottleneck paper, figure 2 (§5.1): depth 12. Either the rank of the input embedding shrinks (d 680, about 70M
# parameters), or the width does (50M to 75M). The vocabulary of 2,000, which it does not name, fits 70M at d 680.
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
