#!/usr/bin/env bash
# What: 2 to 10 heads of size 64 in Baevski and Auli's Transformer on WikiText-103, with and without Mixhead.
# Table: Mixhead paper, table 8.
# Result: Perplexity on training, validation and test set.
# Time: 15 trainings, about 470 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: A context of 25/32 of a block when scoring, as in all tables but table 9.
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
