#!/usr/bin/env bash
# Evidence, part 7: the vocabulary bottleneck. Brown by bytes (257 of them, characters but for a few) and by 2,000 pieces; 4
# layers, d 128, layer norms before sublayers, blocks of 256; the input embedding of rank 4, 16, 64 or whole, the output matrix
# whole and untied. Equally many updates for all. Settings from outside: see ../common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=evidence TABLE=vocabulary FIT=200
COMMON=(
    --arch lowrank_transformer_lm --attention mha --task language_modeling --sample-break-mode none --tokens-per-sample 256
    --decoder-normalize-before --decoder-layers 4 $(lm_width 128) --decoder-ffn-embed-dim 512 --decoder-attention-heads 4
    --dropout 0.1 --optimizer adam --adam-betas 0.9,0.98 --clip-norm 1.0 --weight-decay 0.01
    $(decayed 2e-3 2000) $(batch 2048 2048 256) "${WHOLE_STEPS[@]}" --no-epoch-checkpoints
)
for pieces in 257 2000; do
    CORPUS=brown-bpe$pieces
    for rank in 4 16 64; do row v$pieces-r$rank --embed-rank $rank; done
    row v$pieces-whole
done
loss_on_blocks
