#!/usr/bin/env bash
# What: Seven networks, trained and tested five times each, to see how far a loss moves by chance.
# Table: Vocabulary bottleneck paper, §5: "stable up to 10^-3".
# Result: Losses; `python -m experiments report` gives mean and spread. SEED=3 runs that seed alone.
# Time: 35 trainings, about 880 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: Which seven: three of figure 2, and four of figure 1 with 2,000 subwords, two pairs of equal size.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=vocabulary_bottleneck TABLE="seeds$OTHER_POSITIONS" CORPUS=wikitext-103-bpe2000

# network NAME DEPTH WIDTH FLAGS…
network() { row "$1" --decoder-layers "$2" $(lm_width "$3") --decoder-ffn-embed-dim $((4 * $3)) "${@:4}"; }
network r16-d680 12 680 --embed-rank 16
network r128-d680 12 680 --embed-rank 128
network full-d680 12 680
network l24-d288 24 288
network l48-d200 48 200
network l24-d608 24 608
network l48-d432 48 432
COMMON=("${VOCABULARY_LM[@]}" --decoder-attention-heads 8)
SEEDS="${SEEDS:-${SEED:-1 2 3 4 5}}"
loss_on_blocks
