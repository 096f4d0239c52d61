#!/usr/bin/env bash
# What: The small BERTs of pretraining.sh, one for each method, fine-tuned on sentence polarity and RTE.
# Table: An experiment of this project, without a paper.
# Result: Accuracy on the test parts; `python -m experiments report` gives the spread over seeds, PRR and PEoP.
# Time: 21 trainings, at least 0.54 hours on one H100 or 4.3 hours on 2 cores, each alone and under one seed, as COST=1 estimates.
# Our choice: All settings. SEED is that of fine-tuning: all seeds start from one pre-training.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=brown TABLE=fine-tuning PIECES=brown-bpe8000
for attention in mha mixhead-b mhe-mul mqa sha el skv; do
    CORPUS=$PIECES pretraining $attention --attention $attention "${BROWN_BERT[@]}"
    BASE=$attention
    for task in sentence-polarity rte; do
        fine_tune $attention $task -by-$PIECES 3 --attention $attention "${BROWN_BERT_MODEL[@]}" --lr 1e-4
    done
done
COMMON=("${FINE_TUNING[@]}")
fine_tuning_rows
