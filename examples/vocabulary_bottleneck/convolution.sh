#!/usr/bin/env bash
# Vocabulary bottleneck paper, equations 2 and 4, an experiment of this project next to figure 2: depth 12, d 680, and input embeddings
# of rank 16 or 64 that a convolution over the last K tokens takes to rank K·16 or K·64. If it is the rank of the convolution
# that counts, r16-k4 is as good as figure 2's r64, and r64-k8 as its r512. The paper's convolution has a stride of K, for
# pixels; here it is 1, since a language model predicts each token.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=vocabulary_bottleneck TABLE="convolution$OTHER_POSITIONS" CORPUS=wikitext-103-bpe2000
for rank in 16 64; do
    for kernel in 2 4 8; do
        row r$rank-k$kernel $(lm_width 680) --decoder-ffn-embed-dim 2720 --embed-rank $rank --embed-kernel $kernel
    done
done
COMMON=("${VOCABULARY_LM[@]}" --decoder-layers 12 --decoder-attention-heads 8)
loss_on_blocks
