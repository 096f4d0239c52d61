#!/usr/bin/env bash
# What: IWSLT'14 German to English with 4, 32 and 64 heads of size 128, 16 and 8, with and without Mixhead.
# Table: Mixhead paper, table 4.
# Result: BLEU on validation and test set, by sacrebleu and on tokens, because the paper names no scorer.
# Time: 9 trainings, about 11 hours on one H100 or 920 hours on 2 cores, each alone and under one seed, as COST=1 estimates.
# Our choice: Fairseq's recipe with 50 epochs and beam 5. Encoder and decoder mix, as in the released code, and beam search
#   mixes too. SITES=all also mixes cross attention.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=mixhead TABLE=table4$OTHER_SITES CORPUS=iwslt14 VALID=1
COMMON=("${IWSLT14[@]}" $(layers 6) $(width 512) $(ffn 1024))
for h in 4 32 64; do
    mixing_rows h$h- --arch lowrank_transformer_iwslt_de_en $(heads $h)
done
translation_rows
