#!/usr/bin/env bash
# What: Which attention helps on your own corpus? Plain attention, its control gain, and Mixhead A and B are trained with the
#   same settings.
# Table: An experiment of this project, without a paper.
# Result: A report, and each row against mha, from lines in $LOWRANK_WORK/own/NAME.jsonl.
# Time: It depends on the corpus: COST=1 estimates it.
# Our choice: 3+3 layers of width 256 for 10,000 to 100,000 pairs, and 4 layers for a language model. The factors of gain learn
#   as fast as mixing does.
#
#   scripts/prepare.sh own --name mine --source-lang de --target-lang en --train PREFIX --valid PREFIX --test PREFIX --bpe 10000
#   CORPUS=mine examples/own/compare.sh
#
#   CORPUS=NAME        what prepare.sh own --name called it, or /path/to/data-bin, a folder that fairseq-preprocess made. Its
#                      dictionary shows if words were cut by sentencepiece or subword-nmt: then they are joined for BLEU
#   ROWS="mha gqa --key-value-heads 2 mixhead-b --mixing-lr-scale 4"
#                      methods (values of --attention), each with its own options after it
#   The learning rate rises in 400 updates, or in a tenth of all if these are fewer.
#   SEEDS="1 2 3"      HEADS=8      EPOCHS=12      SMOKE=1, or SEED=4, trains one seed
#   FORMAT=latex       format of the tables: latex or markdown
#   EXTRA="…"          other sizes
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
if [ -z "${CORPUS:-}" ]; then
    echo "CORPUS is not set: expected a name that scripts/prepare.sh own --name gave, or a folder of binarised data" >&2
    exit 2
fi
HEADS="${HEADS:-8}" EPOCHS="${EPOCHS:-12}" SEEDS="${SEEDS:-${SEED:-${SMOKE:-1 2 3}}}"
for setting in HEADS EPOCHS; do
    if [[ ! "${!setting}" =~ ^[1-9][0-9]{0,3}$ ]]; then
        echo "$setting=${!setting}: expected a whole number from 1" >&2
        exit 2
    fi
done
if [[ "$CORPUS" = */* ]]; then
    bin="$(CDPATH= cd "$CORPUS" && pwd)" || exit 2
    CORPUS="$bin" TABLE="$(basename "$bin")-$(cksum <<<"$bin" | cut -d ' ' -f 1)" # many folders are called data-bin
else
    bin="$LOWRANK_WORK/data/$CORPUS/bin" TABLE="$CORPUS"
fi
if [[ ! "${FORMAT:-}" =~ ^(latex|markdown)?$ ]]; then
    echo "FORMAT=$FORMAT: expected latex or markdown" >&2
    exit 2
fi
FORMAT=(${FORMAT:+--format "$FORMAT"})
PAPER=own
RESULTS="${RESULTS:-$LOWRANK_WORK${SMOKE:+/smoke}/own/$TABLE.jsonl}"
tokens=4096
if [ -e "$bin/dict.txt" ]; then tokens=2048; fi
{
    read -r methods
    read -r warmup
} < <(python -c '
import sys
from pathlib import Path
from experiments.recipes.cost import warmup
from fairseq_lowrank.attention import PRESETS
print(*PRESETS)
print(warmup(Path(sys.argv[1]), *map(int, sys.argv[2:])))' "$bin" "$EPOCHS" "$tokens")
OPTIMIZER=(
    --optimizer adam --adam-betas 0.9,0.98 --lr-scheduler inverse_sqrt --warmup-updates "$warmup" --max-epoch "$EPOCHS" --no-epoch-checkpoints
)
if [ -e "$bin/dict.txt" ]; then
    COMMON=(
        --arch lowrank_transformer_lm --task language_modeling --tokens-per-sample 256 --share-decoder-input-output-embed
        --decoder-layers 4 $(lm_width 256) --decoder-ffn-embed-dim 1024 --decoder-attention-heads "$HEADS" --dropout 0.3
        --lr 1e-3 $(batch $tokens $tokens 256) "${OPTIMIZER[@]}"
    )
    score=language_model_rows
else
    COMMON=(
        --arch lowrank_transformer_iwslt_de_en --share-decoder-input-output-embed
        $(layers 3) $(width 256) $(ffn 512) $(heads "$HEADS") --dropout 0.2
        --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --lr 3e-3 $(batch $tokens $tokens) "${OPTIMIZER[@]}"
    )
    score=translation_rows
fi
# method NAME OPTIONS…: declare a row of a method. The options are part of its name.
NAMES=()
method() {
    local name="$*" options=("${@:2}")
    name="$(sed -E 's/[^A-Za-z0-9.]+/-/g; s/-$//' <<<"$name")"
    # A column of M has as many weights as there are heads, so under Adam its sum moves that much faster than one factor.
    if [ "$*" = gain ]; then options=(--mixing-lr-scale "$HEADS"); fi
    NAMES+=("$name")
    row "$name" --attention "$1" "${options[@]}"
}
read -rd "" -a words <<<"${ROWS:-mha gain mixhead-a mixhead-b}" || true # it may have several lines
found=()
for word in "${words[@]}"; do
    if [[ " $methods " = *" $word "* ]]; then
        if ((${#found[@]})); then method "${found[@]}"; fi
        found=("$word")
    elif ((${#found[@]})) && [[ "$word" = --* || "${found[-1]}" = --* ]]; then
        found+=("$word")
    else
        echo "ROWS: '$word' is not a method. Choose from $methods" >&2
        exit 2
    fi
done
method "${found[@]}"
ROWS=""
at_once
$score
report --table "$TABLE" "${FORMAT[@]}"
pairs=()
for name in "${NAMES[@]}"; do
    if [[ "$name" != mha && " ${NAMES[*]} " = *" mha "* ]]; then pairs+=(--pair "$name" mha); fi
done
# trials are not compared
if [ -z "$SMOKE" ] && ((${#pairs[@]})); then compare "${pairs[@]}" "${FORMAT[@]}"; fi
