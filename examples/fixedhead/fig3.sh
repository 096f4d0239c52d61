#!/usr/bin/env bash
# Fixed multi-head attention paper, figure 3 (§4.3): LM1B in 32k subwords, n 256, 6 layers, d 256. (a) More heads: the
# baseline's head size shrinks with them, and its feed-forward layers grow to the size of the model with fixed head size
# 32. (b) Head size against heads; its sizes, and (a)'s steps, are our choice. Tested as figure 1 is, in perplexity of a subword; sizes are printed first.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=fixedhead TABLE=fig3 CORPUS=lm1b-all-heldout-bpe32000
for h in 8 16 32 64; do
    # Fixed heads of size 32 have 4·256·(32·h − 256) more attention weights, which 2·256 a unit of feed-forward matches.
    row a-h$h-mha --arch lowrank_transformer_lm_lm1b_small --attention mha --decoder-attention-heads $h \
        --head-dim $((256 / h)) --decoder-ffn-embed-dim $((1024 + 2 * (32 * h - 256)))
    row a-h$h-fixedhead --arch lowrank_transformer_lm_lm1b_small --attention fixedhead --decoder-attention-heads $h
done
for size in 16 32 64 128; do
    for h in 4 8 16 32; do
        row b-dk$size-h$h-fixedhead --arch lowrank_transformer_lm_lm1b_small --attention fixedhead --head-dim $size \
            --decoder-attention-heads $h
    done
done
COMMON=("${LM1B_SMALL[@]}") EVALUATE="${LM1B_EXAMPLES[*]} --context-window 0 ${EVALUATE:-}"
language_model_sizes
language_model_rows
