#!/usr/bin/env bash
# What: Ten sentences of Multi30k joined, n about 145, with 3+3 layers, d 128 and heads of 32, for 10 epochs.
# Table: The claim of the Mixhead paper's §4.2.4: python -m experiments tables joined-by-ten.
# Result: Bits per token and BLEU, with and without mixing.
# Time: 20 trainings, at least 0.67 hours on one H100 or 4.1 hours on 2 cores, each alone and under one seed, as COST=1 estimates.
# Our choice: One rate like fairseq's recipe for IWSLT'14: 1e-3 for d 128, 560 updates of warm-up, no decay to 0. The others are
#   tuned and decay to 0.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=evidence TABLE=joined-by-ten SPLIT=test_2016_flickr CORPUS=multi30k-x10 PLUGIN=examples/evidence/controls FIT=2000
LONG="--max-source-positions 1024 --max-target-positions 1024"
GENERATE="${GENERATE:---beam 5 --max-len-a 1.5 --max-len-b 50 $LONG}"
COMMON=("${EVIDENCE[@]}" $(ffn 512) $(heads 4) $LONG)
OURS="--arch lowrank_transformer_iwslt_de_en"
UPDATES=1340 # 10 epochs of 134
declare -A RATES=([paper]="--lr 1e-3 --lr-scheduler inverse_sqrt --warmup-updates 560 --max-update $UPDATES")
for rate in 1e-3 2e-3 4e-3; do RATES[$rate]="$(decayed $rate $UPDATES)"; done
for rate in paper 2e-3 1e-3 4e-3; do
    for attention in mha mixhead-a gain; do
        row $attention-$rate $OURS --attention $attention ${RATES[$rate]}
    done
    row mha-pre-norm-$rate $OURS --attention mha --encoder-normalize-before --decoder-normalize-before ${RATES[$rate]}
    row small-start-$rate --arch transformer_small_start_iwslt_de_en --attention mha ${RATES[$rate]}
done
translation_rows
