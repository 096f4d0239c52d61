#!/usr/bin/env bash
# What: A published BERT-base, fine-tuned on SQuAD 1.1 as it is and with Mixhead B. The model is made as table5.sh says.
# Table: Mixhead paper, table 6 (§4.3).
# Result: Exact match and F1 on the development part.
# Time: 2 trainings, about 0.55 hours on one H100 or 120 hours on 2 cores, each alone and under one seed, as COST=1 estimates.
# Our choice: 5 epochs, and 10 times the rate for the mixing. The baseline has BERT's rate and 3 epochs.
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
