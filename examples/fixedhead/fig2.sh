#!/usr/bin/env bash
# What: 24 layers on SQuAD 1.1 and MNLI, against the number of parameters. The baseline has 16 heads of size d/16. Fixed heads
#   have size 128, d 512 and 8 to 32 heads.
# Table: Fixed multi-head attention paper, figure 2 (§4.2); the fixed heads are those of table 2 A.
# Result: F1 and accuracy on the development parts, for each size.
# Time: 36 trainings, about 1,900 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: D 512 to 1024 in steps of 128, and BERT-large's feed-forward size of 4,096 throughout. With it, d 512 has table 2
#   B's 142M parameters.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=fixedhead TABLE=fig2 SPLIT=valid
# model LABEL NAME FLAGS…: the rows of a model, and its pre-training NAME.
model() {
    CORPUS=$BERT_CORPUS bert_pretraining $2 "${@:3}"
    BASE=$2
    fine_tune $1 squad-1.1 -by-$BERT_CORPUS 3 "${@:3}" --lr 5e-5
    fine_tune $1 glue-mnli -by-$BERT_CORPUS 3 "${@:3}" --lr 2e-5
}
for d in 512 640 768 896 1024; do
    model d$d-h16-mha d$d-h16 --arch lowrank_bert_large --max-positions 512 --attention mha --encoder-embed-dim $d \
        --encoder-attention-heads 16
done
for h in 8 12 16 32; do
    model h$h-fixedhead d512-h$h-dk128 --arch lowrank_bert_fixed --max-positions 512 --attention fixedhead \
        --encoder-attention-heads $h --head-dim 128
done
COMMON=("${FINE_TUNING[@]}")
fine_tuning_rows
