#!/usr/bin/env bash
# What: The Brown corpus, word by word: every method in one small language model, and again with 32 heads of size 8.
# Table: An experiment of this project, without a paper.
# Result: Perplexity on validation and test set, after equally many updates.
# Time: About 20 minutes a row on 2 cores.
# Our choice: 4 layers, d 256, n 256, adaptive tied inputs, and post-norm as in fairseq's bare transformer_lm.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
PAPER=brown TABLE=compare CORPUS=brown
COMMON=(
    --arch lowrank_transformer_lm --task language_modeling --sample-break-mode none --tokens-per-sample 256
    --decoder-layers 4 $(lm_width 256) --decoder-ffn-embed-dim 1024 --dropout 0.3
    --adaptive-input --adaptive-input-cutoff 5000,20000 --tie-adaptive-weights --tie-adaptive-proj
    --criterion adaptive_loss --ddp-backend legacy_ddp --adaptive-softmax-cutoff 5000,20000
    --optimizer adam --adam-betas 0.9,0.98 --clip-norm 0.25 --weight-decay 0.01
    --lr 1e-3 --lr-scheduler cosine --warmup-updates 200 --warmup-init-lr 1e-07
    $(batch 2048 2048 256) --max-update 2000 --no-epoch-checkpoints
)
row mha --attention mha --decoder-attention-heads 4
row sigsoftmax --attention mha --attention-activation sigsoftmax --decoder-attention-heads 4
for attention in mixhead-a mixhead-b mhe-mul; do
    row $attention --attention $attention --decoder-attention-heads 4
done
row fixedhead --attention fixedhead --head-dim 128 --decoder-attention-heads 4
for attention in mha mixhead-a mixhead-b; do
    row $attention-h32 --attention $attention --decoder-attention-heads 32
done
at_once
language_model_rows
