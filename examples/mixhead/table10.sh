#!/usr/bin/env bash
# Mixhead paper, table 10: head sizes 32 to 512, the last being Fixhead (head size = sequence length), Baevski and Auli's
# Transformer on WikiText-103.
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
