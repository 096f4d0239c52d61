#!/usr/bin/env bash
# Mixhead paper, table 6 (§4.3): a published BERT-base, fine-tuned on SQuAD 1.1 as it is and with Mixhead B: exact match and F1 on the
# development part. The model is made as table5.sh says. BERT's rate and 3 epochs; 5, and 10 times the rate for the mixing, are our choice.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=mixhead TABLE=table6 CORPUS=brown-bpe2000 SPLIT=valid
MODEL="--arch lowrank_bert_base --max-positions 512"
published bert-base "$LOWRANK_WORK/bert-base/model.pt" $MODEL "${BERT_PRETRAINING[@]}"
BASE=bert-base
fine_tune mha squad-1.1 "" 3 $MODEL --attention mha --lr 5e-5
fine_tune mixhead-b squad-1.1 "" 5 $MODEL --attention mixhead-b --mixing-lr-scale 10 --lr 5e-5
COMMON=("${FINE_TUNING[@]}")
fine_tuning_rows
