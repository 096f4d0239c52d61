#!/usr/bin/env bash
# What: Random and average mixing in Baevski and Auli's Transformer on WikiText-103, with heads of 64.
# Table: Mixhead paper, table 7 (§4.4.2).
# Result: Perplexity on validation and test set.
# Time: 5 trainings, about 68 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: Random mixing is drawn once and never trained, as the paper says. Its columns are divided by their sums (eq. 13),
#   as in the released code.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=mixhead TABLE=table7 CORPUS=wikitext-103
for attention in mha mixhead-a mixhead-b mixhead-random avghead; do
    row $attention --arch lowrank_transformer_lm_wiki103 --attention $attention
done
COMMON=("${BAEVSKI[@]}" --tokens-per-sample 512 --head-dim 64)
language_model_rows
