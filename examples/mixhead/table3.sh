#!/usr/bin/env bash
# What: The One Billion Word benchmark with Baevski and Auli's Transformer, and with Transformer-XL, n 32, whose heads of 128
#   are larger than n.
# Table: Mixhead paper, table 3.
# Result: Perplexity on validation and test set.
# Time: 6 trainings, about 370 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: Blocks of 2048 tokens for Baevski's model, as in the table. The text (§4.1.2) says 512: N=512 runs that, with a
#   separate table.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
N="${N:-2048}"
if [[ ! "$N" =~ ^[1-9][0-9]*$ ]]; then
    echo "N=$N: expected the number of tokens in a block" >&2
    exit 2
fi
PAPER=mixhead TABLE=table3 CORPUS=lm1b
if [ "$N" != 2048 ]; then TABLE=table3-n$N; fi
BAEVSKI_LM1B+=(--tokens-per-sample "$N" $(batch "$((N > 2048 ? N : 2048 / N * N))" 65536 "$N"))
for attention in mha mixhead-a mixhead-b; do
    row baevski-$attention --arch lowrank_transformer_lm_gbw --attention $attention "${BAEVSKI_LM1B[@]}"
done
for attention in mha mixhead-a mixhead-b; do
    row transformer-xl-$attention --arch lowrank_transformer_xl_lm1b --attention $attention "${TRANSFORMER_XL_LM1B[@]}"
done
language_model_rows
