#!/usr/bin/env bash
# What: BERT-large (24 layers, d 1024) with 8, 16 and 32 heads of size d/h, on SQuAD 1.1 and MNLI.
# Table: Fixed multi-head attention paper, table 1.
# Result: F1 and accuracy on the development parts.
# Time: 12 trainings, about 900 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: BERT's settings, see ../settings.sh. The paper prints ± and does not say over how many runs, so SEED is yours.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=fixedhead TABLE=table1 SPLIT=valid
for h in 8 16 32; do
    # spelt as in fig2.sh, which shares the pre-training of 16 heads
    model="--arch lowrank_bert_large --max-positions 512 --attention mha --encoder-embed-dim 1024 --encoder-attention-heads $h"
    CORPUS=$BERT_CORPUS bert_pretraining d1024-h$h $model
    BASE=d1024-h$h
    fine_tune h$h-mha squad-1.1 -by-$BERT_CORPUS 3 $model --lr 5e-5
    fine_tune h$h-mha glue-mnli -by-$BERT_CORPUS 3 $model --lr 2e-5
done
COMMON=("${FINE_TUNING[@]}")
fine_tuning_rows
