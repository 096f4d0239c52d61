#!/usr/bin/env bash
# Evidence, above the head size: how much of mixing's gain with 32 heads of 4 is damping, and what heads lack that do not find
# the source. Settings and table are those of above_head_size.sh. The controls are a plugin: M with column sums held at 1, which
# mixes and cannot damp; output projections that start at half, which damp at first and do not mix; and such a start with mixing.
# Environment variables: see ../common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=evidence TABLE=above-head-size SPLIT=test_2016_flickr CORPUS=multi30k-x4 PLUGIN=examples/evidence/controls FIT=2000
GENERATE="${GENERATE:---beam 5 --max-len-a 1.5 --max-len-b 50}"
COMMON=("${EVIDENCE[@]}" $(heads 32) $(ffn 512))
RUN="$(decayed 2e-3 1260)" # 10 epochs of 126 updates
SMALL_START="--arch transformer_small_start_iwslt_de_en"
row h32-column-sums --arch lowrank_transformer_iwslt_de_en --attention mha --head-mixing column-sums $RUN
row h32-small-start $SMALL_START --attention mha $RUN
row h32-mixhead-a-small-start $SMALL_START --attention mixhead-a $RUN
row h32-fixedhead-small-start $SMALL_START --attention fixedhead --head-dim 32 $RUN
row h32-mha-1e-3 --arch lowrank_transformer_iwslt_de_en --attention mha $(decayed 1e-3 1260)
translation_rows
