#!/usr/bin/env bash
# Fixed multi-head attention paper, figure 1 (§4.2): LM1B in 32k subwords, n 256, 6 layers. Baseline: embedding sizes 256
# to 512, head size d/h. Fixed head size: d 256, head size 32, 4 to 70 heads. What lies between these ends, and ffn 4d, is our choice.
#
# Tested on all 50 held-out parts, the paper's 300k examples, each a sentence by itself. The value is the perplexity of a
# subword, ends of sentences counted; the paper does not name its unit. It says that the sizes of its two curves match,
# which those printed here first do, nearly, without embeddings only: up to 18.9M (baseline) and 17.0M, and with them (tied,
# 32k × d) 35.3M and 25.2M.
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
