#!/usr/bin/env bash
# What: Why does mixing train faster at first? Multi30k, 3+3 layers, d 128, 6 epochs, with 4 heads of 32 and 32 heads of 4.
# Table: An experiment of this project: python -m experiments tables fast-start, with the seeds of each row.
# Result: Bits per token and BLEU, next to controls: one factor per head, M with column sums of 1, and output projections that
#   start at half.
# Time: 69 trainings, at least 1.4 hours on one H100 or 8.2 hours on 2 cores, each alone and under one seed, as COST=1 estimates.
# Our choice: Three rates that decay to 0, and with 4 heads twice the highest too. The last rows give the control mixing's rate:
#   docs/evidence/translation.md.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=evidence TABLE=fast-start SPLIT=test_2016_flickr CORPUS=multi30k PLUGIN=examples/evidence/controls FIT=2000
COMMON=("${EVIDENCE[@]}" $(ffn 512))
OURS="--arch lowrank_transformer_iwslt_de_en"
PRE_NORM="--encoder-normalize-before --decoder-normalize-before"
for setting in {4,32}-{2e-3,1e-3,4e-3} 4-8e-3; do
    IFS=- read -r count rate <<<"$setting"
    run="$(heads $count) $(decayed $rate 786)" # 6 epochs of 131 updates
    for attention in mha mixhead-a gain mixhead-b; do
        row h$count-$attention-$rate $OURS --attention $attention $run
    done
    row h$count-column-sums-$rate $OURS --attention mha --head-mixing column-sums $run
    row h$count-small-start-$rate --arch transformer_small_start_iwslt_de_en --attention mha $run
    if ((count == 4)); then
        for attention in mha mixhead-a gain; do
            row h$count-$attention-pre-norm-$rate $OURS --attention $attention $PRE_NORM $run
        done
    fi
done
# Under Adam a column sum of M moves up to h times as fast as one factor of gain: here their rates are made comparable.
# The last of each count is the control of mixing at twice the rate.
for scale in 4 8; do
    row h4-gain-x$scale-2e-3 $OURS --attention gain --mixing-lr-scale $scale $(heads 4) $(decayed 2e-3 786)
done
for scale in 8 32 64; do
    row h32-gain-x$scale-2e-3 $OURS --attention gain --mixing-lr-scale $scale $(heads 32) $(decayed 2e-3 786)
done
for count in 4 32; do
    run="$(heads $count) $(decayed 2e-3 786)"
    row h$count-common-mode-2e-3 $OURS --attention mha --head-mixing common-mode $run
    row h$count-mixhead-a-x2-2e-3 $OURS --attention mixhead-a --mixing-lr-scale 2 $run
    row h$count-mixhead-a-x0.5-2e-3 $OURS --attention mixhead-a --mixing-lr-scale 0.5 $run
    row h$count-mixhead-a-self-2e-3 $OURS --attention mixhead-a --attention-sites encoder,decoder $run
done
# One gate a head from the layer's input, that starts at a half as published, or at 1: see docs/evidence/translation.md.
run="$(heads 4) $(decayed 2e-3 786)"
row h4-gated-head-half-2e-3 $OURS --attention gated-head --gate-start half $run
row h4-gated-head-2e-3 $OURS --attention gated-head $run
translation_rows
