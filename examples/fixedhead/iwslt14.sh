#!/usr/bin/env bash
# A free head size (fixed multi-head attention paper, §3) on the corpus of the Mixhead paper's table 4: with 4, 32 and 64
# heads, the head size that d/h gives and one that is free of h. IWSLT'14 has n ≈ 24 on average.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=fixedhead TABLE=iwslt14 CORPUS=iwslt14 VALID=1
COMMON=("${IWSLT14[@]}" $(layers 6) $(width 512) $(ffn 1024))
for h in 4 32 64; do
    row h$h-mha --arch lowrank_transformer_iwslt_de_en --attention mha $(heads $h)
    row h$h-fixedhead-32 --arch lowrank_transformer_iwslt_de_en --attention fixedhead --head-dim 32 $(heads $h)
done
translation_rows
