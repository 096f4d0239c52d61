#!/usr/bin/env bash
# Mixhead paper, table 9: sequences of 32 to 512 tokens, Baevski and Auli's Transformer on WikiText-103 with head size 64.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=mixhead TABLE=table9 CORPUS=wikitext-103
for n in 32 64 128 256 512; do
    for attention in mha mixhead-a mixhead-b; do
        row n$n-$attention --arch lowrank_transformer_lm_wiki103 --attention $attention --tokens-per-sample $n
    done
done
COMMON=("${BAEVSKI[@]}" --head-dim 64)
language_model_rows
