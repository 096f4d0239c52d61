#!/usr/bin/env bash
# What: Multi30k, German to English: stock fairseq and every method with the same settings, and again with 32 heads of size 8.
# Table: An experiment of this project, without a paper.
# Result: Sacrebleu on the lower-cased, tokenised test set, beam 5, of the checkpoint with the best validation loss.
# Time: About 30 minutes a row on 2 cores.
# Our choice: All settings.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
PAPER=multi30k TABLE=compare SPLIT=test_2016_flickr CORPUS=multi30k
COMMON=(
    --source-lang de --target-lang en --share-all-embeddings
    $(layers 3) $(width 256) $(ffn 512) --dropout 0.2
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --optimizer adam --adam-betas 0.9,0.98 --lr 3e-3 --lr-scheduler inverse_sqrt --warmup-updates 400
    $(batch 4096 4096) --max-epoch 12 --no-epoch-checkpoints
)
OURS="--arch lowrank_transformer_iwslt_de_en"
row stock --arch transformer_iwslt_de_en $(heads 4)
for attention in mha mixhead-a mixhead-b mhe-mul mqa; do
    row $attention $OURS --attention $attention $(heads 4)
done
for attention in mha mixhead-a mixhead-b; do
    row $attention-h32 $OURS --attention $attention $(heads 32)
done
at_once
translation_rows
