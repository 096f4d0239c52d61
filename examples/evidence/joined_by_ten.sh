#!/usr/bin/env bash
# Evidence, joined by ten: the Mixhead paper's ten concatenated sentences (§4.2.4), n about 145 with heads of 32, 3+3 layers,
# d 128, 10 epochs. One rate is of the paper's kind, and the others are tuned and decay to 0.
# The paper's kind is fairseq's recipe for IWSLT'14: its 5e-4 for d 512 is 1e-3 for d 128 by the rule of d^-0.5, and its warm-up
# of 4,000 updates is 4.3 epochs there, as 560 updates are 4.2 epochs here. It does not decay to 0.
# See docs/evidence/translation.md for the results, and ../common.sh for environment variables.
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
