#!/usr/bin/env bash
# Evidence, above the head size: texts that are longer than the heads. Multi30k with four consecutive sentences concatenated,
# n about 58, 3+3 layers, d 128, 10 epochs, 32 heads of 4 against 4 of 32.
# Two controls have equal parameters: a wider feed-forward layer for fixedhead, and a narrower one for head embeddings
# (tests/test_evidence.py counts). The last two rows are gain at mixing's rate, see docs/evidence/translation.md.
# See docs/evidence/translation.md for the predictions, and ../common.sh for environment variables.
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
