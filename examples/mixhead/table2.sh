#!/usr/bin/env bash
# What: WikiText-2 with the vanilla Transformer (16 layers, n 256) and Transformer-XL (n 150), with and without Mixhead and
#   sigsoftmax.
# Table: Mixhead paper, table 2.
# Result: Perplexity on validation and test set.
# Time: 12 trainings, about 3.0 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: Dropout 0.5 and 10,000 updates. The paper (§4.1.3) asks for stronger dropout than usual, and gives no value.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=mixhead TABLE=table2 CORPUS=wikitext-2
CHOSEN=(--dropout 0.5 --attention-dropout 0.1 --max-update 10000)
for attention in mha mixhead-a mixhead-b; do
    row vanilla-$attention --arch lowrank_transformer_lm_wiki2 --attention $attention "${VANILLA_LM[@]}" \
        --tokens-per-sample 256 "${CHOSEN[@]}"
    row vanilla-$attention-sigsoftmax --arch lowrank_transformer_lm_wiki2 --attention $attention \
        --attention-activation sigsoftmax "${VANILLA_LM[@]}" --tokens-per-sample 256 "${CHOSEN[@]}"
done
for attention in mha mixhead-a mixhead-b; do
    row transformer-xl-$attention --arch lowrank_transformer_xl_wiki2 --attention $attention "${TRANSFORMER_XL_WIKI2[@]}" "${CHOSEN[@]}"
    row transformer-xl-$attention-sigsoftmax --arch lowrank_transformer_xl_wiki2 --attention $attention \
        --attention-activation sigsoftmax "${TRANSFORMER_XL_WIKI2[@]}" "${CHOSEN[@]}"
done
language_model_rows
