#!/usr/bin/env bash
# A small BERT (4 layers, d 256, 8 heads, n 128) pre-trained on the Brown corpus in 8,000 subwords, every method for equally
# many updates, then fine-tuned on sentence polarity and RTE: accuracy on their test parts. SEED is that of fine-tuning; all start
# from one pre-training, that of pretraining.sh. See `fairseq-lowrank report` for the spread over seeds, PRR and PEoP.
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
