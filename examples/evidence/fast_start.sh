#!/usr/bin/env bash
# Evidence, part 4: what the fast start of mixing is. Multi30k, 3+3 layers, d 128, 6 epochs, with 4 heads of 32 and 32 of 4, at
# three rates that decay to 0, and twice the highest with 4 heads. Controls: a factor a head (gain), M with column sums held at
# 1, output weights that start at half. See docs/evidence.md for which rows are run with which seeds, and settings from outside
# in ../common.sh.
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
translation_rows
