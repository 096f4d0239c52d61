#!/usr/bin/env bash
# Mixhead paper, table 4: IWSLT'14 German to English with 4, 32 and 64 heads (head size 128, 16, 8). For settings from
# outside see ../common.sh. BLEU is scored on validation and test set, by sacrebleu and on tokens: the paper names no scorer.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=mixhead TABLE=table4 CORPUS=iwslt14 VALID=1
COMMON=("${IWSLT14[@]}" $(layers 6) $(width 512) $(ffn 1024))
for h in 4 32 64; do
    for attention in mha mixhead-a mixhead-b; do
        row h$h-$attention --arch lowrank_transformer_iwslt_de_en --attention $attention $(heads $h)
    done
done
translation_rows
