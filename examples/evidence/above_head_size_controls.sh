#!/usr/bin/env bash
# What: How much of mixing's lead with 32 heads of 4 is damping, and what do heads lack that do not find the source?
# Table: An experiment of this project, with the settings and the table of above_head_size.sh: python -m experiments tables above-head-size.
# Result: Bits per token and BLEU of three controls, which are a plugin.
# Time: 5 trainings, at least 0.16 hours on one H100 or 1.3 hours on 2 cores, each alone and under one seed, as COST=1 estimates.
# Our choice: M with column sums of 1 mixes and cannot damp. Output projections that start at half damp at first and do not mix.
#   The third has such a start and mixing.
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
