#!/usr/bin/env bash
# What: 24 layers, d 512, on SQuAD 1.1 and MNLI. PART=A has 8 to 32 heads of size 128. PART=B has 8 heads of size 32 to 256.
# Table: Fixed multi-head attention paper, table 2; both parts without PART.
# Result: F1 and accuracy on the development parts.
# Time: 16 trainings a part, about 810 hours on one H100 for A and 590 for B, each alone and under one seed, as COST=1 estimates.
# Our choice: The settings of table1.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=fixedhead SPLIT=valid COMMON=("${FINE_TUNING[@]}")
case "${PART:-AB}" in
    A | B | AB) ;;
    *)
        echo "PART=$PART: expected A or B" >&2
        exit 2
        ;;
esac

if [ -n "${ROWS:-}" ] && [ "${PART:-AB}" = AB ]; then
    echo "ROWS=$ROWS: expected PART=A or PART=B too, because their rows differ" >&2
    exit 2
fi

# model LABEL HEADS SIZE: the rows of a model; pre-trainings are shared by tables.
model() {
    local model="--arch lowrank_bert_fixed --max-positions 512 --attention fixedhead --encoder-attention-heads $2 --head-dim $3"
    CORPUS=$BERT_CORPUS bert_pretraining d512-h$2-dk$3 $model
    BASE=d512-h$2-dk$3
    fine_tune $1 squad-1.1 -by-$BERT_CORPUS 3 $model --lr 5e-5
    fine_tune $1 glue-mnli -by-$BERT_CORPUS 3 $model --lr 2e-5
}
if [[ "${PART:-AB}" == *A* ]]; then
    TABLE=table2a
    for h in 8 12 16 32; do model h$h-fixedhead $h 128; done
    fine_tuning_rows
fi
if [[ "${PART:-AB}" == *B* ]]; then
    TABLE=table2b DECLARED=()
    for size in 32 64 128 256; do model dk$size-fixedhead 8 $size; done
    fine_tuning_rows
fi
