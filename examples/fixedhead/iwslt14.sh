#!/usr/bin/env bash
# What: A free head size for translation: 4, 32 and 64 heads, each with the head size d/h and with one that does not depend on
#   h.
# Table: An experiment of this project on the corpus of the Mixhead paper's table 4, for §3 of the fixed multi-head attention
#   paper.
# Result: BLEU on validation and test set; sentences have 24 tokens on average.
# Time: 6 trainings, about 7.3 hours on one H100 or 780 hours on 2 cores, each alone and under one seed, as COST=1 estimates.
# Our choice: The free head sizes; the training is that of mixhead/table4.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=fixedhead TABLE=iwslt14 CORPUS=iwslt14 VALID=1
COMMON=("${IWSLT14[@]}" $(layers 6) $(width 512) $(ffn 1024))
for h in 4 32 64; do
    row h$h-mha --arch lowrank_transformer_iwslt_de_en --attention mha $(heads $h)
    row h$h-fixedhead-32 --arch lowrank_transformer_iwslt_de_en --attention fixedhead --head-dim 32 $(heads $h)
done
translation_rows
