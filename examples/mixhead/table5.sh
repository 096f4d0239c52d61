#!/usr/bin/env bash
# What: A published BERT-base, fine-tuned on eight tasks of GLUE as it is and with Mixhead B.
# Table: Mixhead paper, table 5 (§4.3).
# Result: Scores of the development parts. A run's folder in $LOWRANK_WORK has `predictions` with the files for the test server.
# Time: 16 trainings, about 5.9 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: 5 epochs instead of BERT's 3, and 10 times the rate for the mixing. The paper's appendix with its settings is not
#   available to us.
#
#   BERT=bert-base-uncased examples/mixhead/table5.sh     the download, in transformers' layout
#   python -m experiments bert import bert-base-uncased --output "${LOWRANK_WORK:-$HOME/.cache/fairseq_lowrank}/bert-base"   or once, for runs without BERT
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=mixhead TABLE=table5 CORPUS=brown-bpe2000 SPLIT=valid
MODEL="--arch lowrank_bert_base --max-positions 512"
published bert-base "$LOWRANK_WORK/bert-base/model.pt" $MODEL "${BERT_PRETRAINING[@]}"
BASE=bert-base
for task in mnli qqp qnli sst-2 cola sts-b mrpc rte; do
    fine_tune mha glue-$task "" 3 $MODEL --attention mha --lr 2e-5
    fine_tune mixhead-b glue-$task "" 5 $MODEL --attention mixhead-b --mixing-lr-scale 10 --lr 2e-5
done
COMMON=("${FINE_TUNING[@]}")
fine_tuning_rows
