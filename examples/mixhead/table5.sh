#!/usr/bin/env bash
# Mixhead paper, table 5 (§4.3): a published BERT-base, fine-tuned on eight tasks of GLUE as it is and with Mixhead B.
#
#   BERT=bert-base-uncased examples/mixhead/table5.sh     the download, in transformers' layout
#   fairseq-lowrank import-bert bert-base-uncased --output "${LOWRANK_WORK:-$HOME/.cache/fairseq_lowrank}/bert-base"   or once, for runs without BERT
#
# The paper has scores of the test server: the line of a row has those of development parts, and its run's folder in
# $LOWRANK_WORK holds `predictions` with the files that the server takes. It gives its parameters in an appendix that is not at
# hand, and says that Mixhead takes more steps, with a larger rate for the mixing: 5 epochs instead of BERT's 3, and 10 times, are
# our choice.
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
