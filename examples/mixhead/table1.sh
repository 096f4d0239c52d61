#!/usr/bin/env bash
# What: WikiText-103 with the vanilla Transformer, Baevski and Auli's, the Synthesizer (n 512) and Transformer-XL (n 150), with
#   and without Mixhead and sigsoftmax.
# Table: Mixhead paper, table 1.
# Result: Perplexity on validation and test set. Transformer-XL is scored with the memory of its training, one segment after the
#   other.
# Time: 24 trainings, about 220 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: The Synthesizer is trained like Baevski's model, since the paper gives no settings for it.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=mixhead TABLE=table1 CORPUS=wikitext-103

# model NAME FLAGS…: the six rows of a model.
model() {
    local attention
    for attention in mha mixhead-a mixhead-b; do
        row "$1-$attention" "${@:2}" --attention $attention
        row "$1-$attention-sigsoftmax" "${@:2}" --attention $attention --attention-activation sigsoftmax
    done
}
model vanilla --arch lowrank_transformer_lm_wiki103_vanilla "${VANILLA_LM[@]}" --tokens-per-sample 512 --max-update 50000
model baevski --arch lowrank_transformer_lm_wiki103 "${BAEVSKI[@]}" --tokens-per-sample 512
model synthesizer --arch lowrank_synthesizer_lm_wiki103 "${BAEVSKI[@]}" --tokens-per-sample 512
model transformer-xl --arch lowrank_transformer_xl_wiki103 "${TRANSFORMER_XL[@]}"
language_model_rows
