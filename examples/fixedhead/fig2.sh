#!/usr/bin/env bash
# Fixed multi-head attention paper, figure 2 (§4.2): 24 layers on SQuAD 1.1 and MNLI against parameters. Baseline: 16 heads of size
# d/16, d 512 to 1024 in steps of 128, which are our choice. Fixed head size: d 512, 8 to 32 heads of size 128, as table 2 A. The feed-forward
# size is BERT-large's 4,096 throughout: the paper says that the embedding size is varied, and with it d 512 has table 2 B's 142M.
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
