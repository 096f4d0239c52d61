#!/usr/bin/env bash
# Mixhead paper, table 8: 2 to 10 heads of size 64, Baevski and Auli's Transformer on WikiText-103.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=mixhead TABLE=table8 CORPUS=wikitext-103
for h in 2 4 6 8 10; do
    for attention in mha mixhead-a mixhead-b; do
        row h$h-$attention --arch lowrank_transformer_lm_wiki103 --attention $attention --decoder-attention-heads $h
    done
done
COMMON=("${BAEVSKI[@]}" --tokens-per-sample 512 --head-dim 64)
language_model_rows
