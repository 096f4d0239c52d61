#!/usr/bin/env bash
# What: BERT-base's sizes with seven methods without biases, pre-trained, and fine-tuned on GLUE, SuperGLUE, SQuAD 1.1 and 2.0.
# Table: MHE poster, first results table. Its 28.32M parameters are those of 12 layers, d 768 and 12 heads.
# Result: Scores of the development parts; `python -m experiments report` adds PRR and PEoP. By its values, the poster's Acc of SQuAD
#   is F1.
# Time: 126 trainings, about 620 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: BERT's text, lengths and updates (../settings.sh), and 2 epochs in batches of 48 for SQuAD 2.0. SuperGLUE has 10
#   epochs at BERT's rate for GLUE. Its mean is of five tasks (`scripts/prepare.sh superglue --help` says why). GLUE's mean has
#   MNLI's matched part, and `glue-8` leaves WNLI out.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=mhe TABLE=encoder SPLIT=valid
for attention in mha sha el mqa skv mhe-add mhe-mul; do
    model="--arch lowrank_bert_base --max-positions 512 --attention $attention --no-attention-bias"
    CORPUS=$BERT_CORPUS bert_pretraining $attention $model
    BASE=$attention
    for task in cola sst-2 mrpc sts-b qqp mnli qnli rte wnli; do
        fine_tune $attention glue-$task -by-$BERT_CORPUS 3 $model --lr 2e-5
    done
    for task in boolq cb rte wic multirc; do
        fine_tune $attention superglue-$task -by-$BERT_CORPUS 10 $model --lr 2e-5
    done
    fine_tune $attention squad-1.1 -by-$BERT_CORPUS 3 $model --lr 5e-5
    fine_tune $attention squad-2.0 -by-$BERT_CORPUS 2x48 $model --lr 5e-5
done
COMMON=("${FINE_TUNING[@]}")
fine_tuning_rows
