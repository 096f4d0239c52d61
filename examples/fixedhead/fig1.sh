#!/usr/bin/env bash
# What: LM1B in 32k subwords, n 256, 6 layers. The baseline has embedding sizes 256 to 512. Fixed heads of size 32 have d 256
#   and 4 to 70 heads.
# Table: Fixed multi-head attention paper, figure 1 (§4.2).
# Result: The sizes of all models, then the perplexity of a subword on the 300,000 held-out sentences, ends of sentences
#   counted.
# Time: 28 trainings, about 210 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: The steps between the printed ends, and feed-forward layers of 4d. The paper does not name the unit of its
#   perplexity. Its two curves match in size only without embeddings: 18.9M and 17.0M here, and 35.3M and 25.2M with them.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=fixedhead TABLE=fig1 CORPUS=lm1b-all-heldout-bpe32000
for d in 256 320 384 448 512; do
    for h in 4 8 16 32; do
        row d$d-h$h-mha --arch lowrank_transformer_lm_lm1b_small --attention mha --decoder-attention-heads $h \
            --head-dim $((d / h)) $(lm_width $d) --decoder-ffn-embed-dim $((4 * d))
    done
done
for h in 4 8 16 24 32 48 64 70; do
    row h$h-fixedhead --arch lowrank_transformer_lm_lm1b_small --attention fixedhead --decoder-attention-heads $h
done
COMMON=("${LM1B_SMALL[@]}") EVALUATE="${LM1B_EXAMPLES[*]} --context-window 0 ${EVALUATE:-}"
language_model_sizes
language_model_rows
