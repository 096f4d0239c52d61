#!/usr/bin/env bash
# What: A published BERT, fine-tuned with mixing on sentence polarity (one epoch) and RTE 1 to 3 (two epochs).
# Table: An experiment of this project, with predictions: python -m experiments tables published-bert.
# Result: Accuracy, next to the control gain. Mixing alone is trained next to the head alone.
# Time: 10 trainings, at least 0.057 hours on one H100 or 12 hours on 2 cores, each alone and under one seed, as COST=1 estimates.
# Our choice: All settings.
#
#   BERT=all-MiniLM-L6-v2 SEED=1 examples/evidence/published_bert.sh     a folder in transformers' layout, with 12 heads
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=evidence TABLE=published-bert CORPUS=brown-bpe2000 PLUGIN=examples/evidence/controls
MODEL="--max-positions 512"
OURS="--arch lowrank_bert_base $MODEL --lr 5e-5" FROZEN="--arch bert_frozen_base $MODEL --lr 1e-3"
published bert-base "$LOWRANK_WORK/bert-base/model.pt" --arch lowrank_bert_base $MODEL "${BERT_PRETRAINING[@]}"
BASE=bert-base
for task in "sentence-polarity 1" "rte 2"; do
    read -r corpus epochs <<<"$task"
    fine_tune mha $corpus "" $epochs $OURS --attention mha
    fine_tune mixhead-b $corpus "" $epochs $OURS --attention mixhead-b --mixing-lr-scale 10
    fine_tune gain $corpus "" $epochs $OURS --attention gain --mixing-lr-scale 12
    fine_tune mixing-alone $corpus "" $epochs $FROZEN --attention mixhead-b
    fine_tune head-alone $corpus "" $epochs $FROZEN --attention mha
done
COMMON=("${FINE_TUNING[@]}")
fine_tuning_rows
