#!/usr/bin/env bash
# What: What do small heads cost a language model, and what gives it back? The Brown corpus by bytes, with 4 heads of 32 and 32
#   heads of 4.
# Table: An experiment of this project, with predictions: python -m experiments tables language-model.
# Result: Bits per byte on validation and test set.
# Time: 33 trainings, at least 2.2 hours on one H100 or 2.2 hours on 2 cores, each alone and under one seed, as COST=1 estimates.
# Our choice: Pre-norm, 4 layers, d 128, n 256, and 2,000 updates of 2,048 bytes at a rate that decays to 0.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=evidence TABLE=language-model CORPUS=brown-bpe257 PLUGIN=examples/evidence/controls FIT=256
COMMON=("${BYTES_LM[@]}")
FFN="--decoder-ffn-embed-dim 512"
OURS="--arch lowrank_transformer_lm $FFN"
at_2e3="$(decayed 2e-3 2000)"
for count in 4 32; do
    for attention in mha mixhead-a; do
        row h$count-$attention $OURS --attention $attention --decoder-attention-heads $count $at_2e3
    done
done
row h32-mixhead-b $OURS --attention mixhead-b --decoder-attention-heads 32 $at_2e3
row h32-gain-x8 $OURS --attention gain --mixing-lr-scale 8 --decoder-attention-heads 32 $at_2e3
row h32-small-start --arch transformer_lm_small_start $FFN --attention mha --decoder-attention-heads 32 $at_2e3
row h32-score-mixing $OURS --attention mha --score-mixing static --decoder-attention-heads 32 $at_2e3
for count in 4 32; do
    row h$count-mha-1e-3 $OURS --attention mha --decoder-attention-heads $count $(decayed 1e-3 2000)
done
# An update of h32-mixhead-a takes 1.6 times as long as one of h32-mha, so plain attention gets 1.6 times as many.
row h32-mha-equal-time $OURS --attention mha --decoder-attention-heads 32 $(decayed 2e-3 3200)
# The temperature that mixing of scores could be imitating: one factor per head on the logits, at 32 times the rate.
row h32-score-gain-x32 $OURS --attention mha --score-mixing diagonal --mixing-lr-scale 32 --decoder-attention-heads 32 $at_2e3
# Is it the rank of scores? Queries and keys of 32 (of 128 with 4 heads) with the same values, the same number of new weights in
# the feed-forward layers, and mixing before the softmax with heads that are large enough.
row h32-qk32 $OURS --attention mha --head-dim 32 --value-dim 4 --decoder-attention-heads 32 $at_2e3
row h32-ffn1404 --arch lowrank_transformer_lm --decoder-ffn-embed-dim 1404 --attention mha --decoder-attention-heads 32 $at_2e3
row h4-qk128 $OURS --attention mha --head-dim 128 --value-dim 32 --decoder-attention-heads 4 $at_2e3
row h4-score-mixing $OURS --attention mha --score-mixing static --decoder-attention-heads 4 $at_2e3
# Does the cost last? 2.2 epochs.
long="$(decayed 2e-3 6000)"
row h4-mha-6000 $OURS --attention mha --decoder-attention-heads 4 $long
for mixing in none static; do
    label=mha
    [ $mixing = none ] || label=score-mixing
    row h32-$label-6000 $OURS --attention mha --score-mixing $mixing --decoder-attention-heads 32 $long
done
# What do small heads cost when each row has its best rate? Seed 1 at each rate until one is worse, then three seeds at the best.
for rate in 3e-3 4e-3 6e-3; do
    decay="$(decayed $rate 2000)"
    row h4-mha-$rate $OURS --attention mha --decoder-attention-heads 4 $decay
    row h32-mha-$rate $OURS --attention mha --decoder-attention-heads 32 $decay
    row h32-score-mixing-$rate $OURS --attention mha --score-mixing static --decoder-attention-heads 32 $decay
    row h32-score-gain-x32-$rate $OURS --attention mha --score-mixing diagonal --mixing-lr-scale 32 \
        --decoder-attention-heads 32 $decay
done
row h32-mha-3e-3-3200 $OURS --attention mha --decoder-attention-heads 32 $(decayed 3e-3 3200)
# About the time of h32-score-mixing-6000 for plain attention: 1.6 times its updates.
row h32-mha-9600 $OURS --attention mha --decoder-attention-heads 32 $(decayed 2e-3 9600)
language_model_rows
