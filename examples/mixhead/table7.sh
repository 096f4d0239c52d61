#!/usr/bin/env bash
# Mixhead paper, table 7: random and average mixing, Baevski and Auli's Transformer on WikiText-103 with head size 64.
# Random mixing is drawn once from the normal distribution and never trained, as the paper says (§4.4.2). Its columns are
# divided by their sums (eq. 13), as in the authors' released code.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=mixhead TABLE=table7 CORPUS=wikitext-103
for attention in mha mixhead-a mixhead-b mixhead-random avghead; do
    row $attention --arch lowrank_transformer_lm_wiki103 --attention $attention
done
COMMON=("${BAEVSKI[@]}" --tokens-per-sample 512 --head-dim 64)
language_model_rows
