#!/usr/bin/env bash
# MHE poster, second results table: WMT'14 English to German, seven sizes, each with MHA and MHE-Mul, no attention biases.
# Dropout and updates as printed there; 12h (width 768) has the lr of the base model, which is our choice. No size drops attention
# probabilities, as in Vaswani et al. (fairseq's other big architecture does), whose are feed-forward sizes, batch, and a beam of 4 with
# length penalty 0.6; the best checkpoint is scored, without averaging. Environment variables: see ../common.sh.
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
