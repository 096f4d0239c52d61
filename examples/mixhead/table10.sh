#!/usr/bin/env bash
# What: Head sizes 32 to 512 in Baevski and Auli's Transformer on WikiText-103; the last is Fixhead, whose head size is the
#   sequence length.
# Table: Mixhead paper, table 10.
# Result: Perplexity on validation and test set.
# Time: 15 trainings, about 660 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: A context of 25/32 of a block when scoring, as in all tables but table 9.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=mixhead TABLE=table10 CORPUS=wikitext-103
for size in 32 64 128 256 512; do
    for attention in mha mixhead-a mixhead-b; do
        row dk$size-$attention --arch lowrank_transformer_lm_wiki103 --attention $attention --head-dim $size
    done
done
COMMON=("${BAEVSKI[@]}" --tokens-per-sample 512)
language_model_rows
