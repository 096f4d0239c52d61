#!/usr/bin/env bash
# MHE poster, first results table: BERT-base's sizes (12 layers, d 768, 12 heads, as its 28.32M say), seven methods without biases, pre-trained
# and fine-tuned on GLUE, SuperGLUE, SQuAD 1.1 and 2.0; PRR and PEoP by `fairseq-lowrank report`. The poster names no text, lengths
# or updates: BERT's, see examples/settings.sh (SQuAD 2.0: 2 epochs in batches of 48), and of SuperGLUE, which BERT's paper has not,
# our 10 epochs at its rate for GLUE. Of SuperGLUE five tasks, whose mean is `superglue-5` (`scripts/prepare.sh superglue
# --help` says why not the others); the mean of GLUE has MNLI's matched part, `glue-8` leaves WNLI out: the
# poster names neither tasks nor split. It heads all columns Acc; what it prints for SQuAD is, by its values, F1.
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
