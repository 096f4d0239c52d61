#!/usr/bin/env bash
# Mixhead paper, table 3: the One Billion Word benchmark with Baevski and Auli's Transformer, in blocks of N tokens, and with
# Transformer-XL, n 32, whose heads of size 128 are larger than that. Of Baevski's blocks the table says n = 2048 and the text
# (§4.1.2) 512: N=512 in the environment runs the latter, with a separate table.
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
