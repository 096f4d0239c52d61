#!/usr/bin/env bash
# What: BERT's pre-training on the Brown corpus in 8,000 subwords, with every method in one small model.
# Table: An experiment of this project. Objectives, masks and dropout are BERT's (Devlin et al. 2019).
# Result: Perplexity of masked words on the test set, and the share of next sentences told right.
# Time: Half an hour a row on one core.
# Our choice: 4 layers, d 256, 8 heads of 32, pairs of up to 128 tokens, rates and updates, for a corpus of a million words.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=brown TABLE=pretraining CORPUS=brown-bpe8000
COMMON=("${BROWN_BERT[@]}")
for attention in mha mixhead-a mixhead-b mixhead-random avghead gain talking-heads; do row $attention --attention $attention; done
row fixedhead --attention fixedhead --head-dim 128
row gqa --attention gqa --key-value-heads 2
for attention in mhe-add mhe-mul mqa sha skv el; do row $attention --attention $attention; done
masked_language_model_rows
