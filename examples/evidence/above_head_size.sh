#!/usr/bin/env bash
# What: Texts that are longer than heads: four sentences of Multi30k joined, n about 58, with 32 heads of 4 against 4 of 32.
# Table: An experiment of this project, with predictions: python -m experiments tables above-head-size.
# Result: Bits per token and BLEU, next to two controls of equal parameters and gain at mixing's rate.
# Time: 12 trainings, at least 0.38 hours on one H100 or 2.8 hours on 2 cores, each alone and under one seed, as COST=1 estimates.
# Our choice: 3+3 layers, d 128, 10 epochs. The controls have a wider feed-forward layer for fixedhead, and a narrower one for
#   head embeddings.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=evidence TABLE=above-head-size SPLIT=test_2016_flickr CORPUS=multi30k-x4 FIT=2000
GENERATE="${GENERATE:---beam 5 --max-len-a 1.5 --max-len-b 50}"
COMMON=("${EVIDENCE[@]}" $(decayed 2e-3 1260)) # 10 epochs of 126 updates
OURS="--arch lowrank_transformer_iwslt_de_en"
for count in 4 32; do
    for attention in mha mixhead-a; do
        row h$count-$attention $OURS --attention $attention $(heads $count) $(ffn 512)
    done
done
row h32-gain $OURS --attention gain $(heads 32) $(ffn 512)
row h32-fixedhead $OURS --attention fixedhead --head-dim 32 $(heads 32) $(ffn 512)
row h32-mha-wide $OURS --attention mha $(heads 32) $(ffn 3200)
row h4-mhe-mul $OURS --attention mhe-mul $(heads 4) $(ffn 512)
row h4-sha $OURS --attention sha $(heads 4) $(ffn 512)
row h4-mha-narrow $OURS --attention mha $(heads 4) $(ffn 298)
row h4-gain-x4 $OURS --attention gain --mixing-lr-scale 4 $(heads 4) $(ffn 512)
row h32-gain-x8 $OURS --attention gain --mixing-lr-scale 8 $(heads 32) $(ffn 512)
translation_rows
