#!/usr/bin/env bash
# What: WMT'14 English to German in seven sizes, each with MHA and MHE-Mul, without attention biases.
# Table: MHE poster, second results table, with its dropout and updates.
# Result: BLEU of the best checkpoint, without averaging.
# Time: 14 trainings, about 46 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: 12h (width 768) has the base model's learning rate. Feed-forward sizes, batch, beam 4 and length penalty 0.6 are
#   those of Vaswani et al., so no size drops attention probabilities.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=mhe TABLE=wmt14 CORPUS=wmt14 SPLIT=test GENERATE="${GENERATE:---beam 4 --lenpen 0.6}"
COMMON=(--no-attention-bias "${WMT14[@]}")

# size NAME ARCHITECTURE FLAGS…: the two rows of a size; Vaswani et al. (2017) have a feed-forward size of 4d.
size() {
    for attention in mha mhe-mul; do
        row "$1-$attention" --arch "lowrank_transformer_wmt_en_de$2" --attention $attention "${@:3}"
    done
}
base="$(width 512) $(ffn 2048) --dropout 0.1 --max-update 100000 $WMT14_BASE_LR"
size base "" $base $(layers 6) $(heads 8)
size base-h16 "" $base $(layers 6) $(heads 16)
size base-h4 "" $base $(layers 6) $(heads 4)
size 4l "" $base $(layers 4) $(heads 8)
size 8l "" $base $(layers 8) $(heads 8)
size 12h "" $(layers 6) $(width 768) $(ffn 3072) $(heads 12) --dropout 0.15 --max-update 100000 $WMT14_BASE_LR
size big _big $(layers 6) $(width 1024) $(ffn 4096) $(heads 16) --dropout 0.3 --attention-dropout 0 --max-update 300000 $WMT14_BIG_LR
translation_rows
