#!/usr/bin/env bash
# What: Depth 24 against 48 at 5M to 110M parameters, with vocabularies of 257 (bytes), 500 and 2,000 subwords.
# Table: Vocabulary bottleneck paper, figure 1 (§5.2.1): the smaller the vocabulary, the earlier the deeper model wins.
# Result: Losses on validation and test set, which compare within a vocabulary only.
# Time: 48 trainings, about 1,200 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: WikiText-103. The control has 50,257 subwords that are learned on the corpus, where the paper has GPT-2's
#   vocabulary.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=vocabulary_bottleneck TABLE="fig1$OTHER_POSITIONS"
for vocabulary in 257 500 2000 50257; do
    CORPUS=wikitext-103-bpe$vocabulary
    # Widths at equal size: 12·L·d² is 5M, 12M, 24M, 48M, 73M and 107M.
    for d in 136 200 288 408 504 608; do
        row v$vocabulary-l24-d$d --decoder-layers 24 $(lm_width $d) --decoder-ffn-embed-dim $((4 * d))
    done
    for d in 96 144 200 288 360 432; do
        row v$vocabulary-l48-d$d --decoder-layers 48 $(lm_width $d) --decoder-ffn-embed-dim $((4 * d))
    done
done
COMMON=("${VOCABULARY_LM[@]}" --decoder-attention-heads 8)
loss_on_blocks
