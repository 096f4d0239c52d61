#!/usr/bin/env bash
# What: Input embeddings of rank 16 or 64, which a convolution over the last K tokens takes to rank K·16 or K·64. Depth 12, d
#   680.
# Table: An experiment of this project for equations 2 and 4 of the vocabulary bottleneck paper, next to its figure 2.
# Result: Losses. If the rank of the convolution counts, r16-k4 is as good as figure 2's r64, and r64-k8 as its r512.
# Time: 6 trainings, about 150 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: A stride of 1, because a language model predicts each token. The paper's stride is K, for pixels.
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
