#!/usr/bin/env bash
# Mixhead paper, table 4: IWSLT'14 German to English with 4, 32 and 64 heads (head size 128, 16, 8). Environment
# variables: see ../common.sh. BLEU is scored on validation and test set, by sacrebleu and on tokens: the paper names no scorer.
# Mixing is in the encoder and the decoder, as in the authors' released code, which does not mix in beam search; here it does.
# SITES=all mixes cross attention too.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=mixhead TABLE=table4$OTHER_SITES CORPUS=iwslt14 VALID=1
COMMON=("${IWSLT14[@]}" $(layers 6) $(width 512) $(ffn 1024))
for h in 4 32 64; do
    mixing_rows h$h- --arch lowrank_transformer_iwslt_de_en $(heads $h)
done
translation_rows
