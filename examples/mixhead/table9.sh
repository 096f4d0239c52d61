#!/usr/bin/env bash
# What: Sequences of 32 to 512 tokens in Baevski and Auli's Transformer on WikiText-103, with heads of 64.
# Table: Mixhead paper, table 9. The paper does not say how it was evaluated, and it differs from tables 7 and 8.
# Result: Perplexity on validation and test set.
# Time: 15 trainings, about 230 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: WINDOW=20 tokens of context before each block of the test set, at every length. By the validation column, blocks
#   of 32 to 256 tokens agree with 16 to 23. Blocks of 512 agree with 0 to 8.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
WINDOW="${WINDOW:-20}"
if [[ ! "$WINDOW" =~ ^(0|[1-9]|[12][0-9]|3[01])$ ]]; then
    echo "WINDOW=$WINDOW: expected a number of tokens from 0 to 31, the shortest sequence less one" >&2
    exit 2
fi
PAPER=mixhead TABLE=table9 CORPUS=wikitext-103 EVALUATE="--context-window $WINDOW ${EVALUATE:-}"
for n in 32 64 128 256 512; do
    for attention in mha mixhead-a mixhead-b; do
        row n$n-$attention --arch lowrank_transformer_lm_wiki103 --attention $attention --tokens-per-sample $n
    done
done
COMMON=("${BAEVSKI[@]}" --head-dim 64)
language_model_rows
