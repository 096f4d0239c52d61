#!/usr/bin/env bash
# What: The byte language model whose queries, keys and values are mixed over heads by learned matrices, which fold into the
#   projections.
# Table: An experiment of this project, with predictions: python -m experiments tables head-maps.
# Result: Bits per byte, next to controls at the same rate: one factor per head, and the projection of values.
# Time: 10 trainings, at least 0.50 hours on one H100 or 0.47 hours on 2 cores, each alone and under one seed, as COST=1 estimates.
# Our choice: 4 heads of 32 and 32 heads of 4, 2,000 updates. The recorded rows were trained on a GPU in float32: PRECISION="".
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=evidence TABLE=head-maps CORPUS=brown-bpe257 PLUGIN=examples/evidence/controls FIT=256
COMMON=("${BYTES_LM[@]}" --decoder-ffn-embed-dim 512 $(decayed 2e-3 2000))
OURS="--arch lowrank_transformer_lm --attention"
for count in 4 32; do
    heads="--decoder-attention-heads $count" faster="--mixing-lr-scale $count"
    row h$count-mha $OURS mha $heads
    row h$count-headmix $OURS headmix $heads
    row h$count-headmix-x$count $OURS headmix $faster $heads
    row h$count-gain-x$count $OURS gain $faster $heads
    row h$count-mha-values-x$count --arch transformer_lm_value_rate --attention mha $heads
done
language_model_rows
