#!/usr/bin/env bash
# Train a small German-English translation model with Mixhead attention and one with plain attention, in a few minutes.
#
#   scripts/quickstart.sh [--data grammar|multi30k] [--attention PRESET]
#
#   --data grammar       sentences of a small grammar (default; nothing to download, about 2 minutes)
#   --data multi30k      real image captions: rows PRESET and mha of examples/multi30k/compare.sh (about an hour); they are in
#                        FOLDER/multi30k with LOWRANK_DATA=FOLDER, or fetched with PREPARE="--download"
#   --attention PRESET   the attention to compare with mha: mixhead-a (default), mixhead-b, mhe-mul, mqa, …; with mha, only mha
#
# Sets up .venv first (SETUP=0: takes .venv as it is or, without one, the Python on PATH), then makes the corpus, trains both
# models and translates the test set. Shows ten translations, the commands, and a table of both models: parameters, validation
# loss and BLEU.
# Finished steps are kept in LOWRANK_WORK (default: the folder work of this clone) and skipped the next time; training that
# was interrupted resumes from its last epoch. On CPUs both models train at the same time, with a thread each: JOBS=1 trains
# one after the other, and THREADS=2 gives each two threads. SMOKE=1 only shows that everything runs: a fraction of the data,
# one epoch, useless models.
set -euo pipefail
root="$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

usage() { sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "${BASH_SOURCE[0]}"; }
refuse() {
    echo "quickstart: error: $*" >&2
    exit 2
}

data=grammar attention=mixhead-a
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit ;;
        --data | --attention)
            [ $# -ge 2 ] || refuse "$1 needs a value; see --help"
            declare "${1#--}=$2"
            shift 2
            ;;
        *) refuse "unknown argument '$1'; see --help" ;;
    esac
done
case "$data" in grammar | multi30k) ;; *) refuse "--data $data: expected grammar or multi30k" ;; esac

export LOWRANK_WORK="${LOWRANK_WORK:-$root/work}" # other clones have other code
[ "${SETUP:-1}" = 0 ] || "$root/scripts/setup.sh"
source "$root/examples/environment.sh"
grammar="$(python -c 'from experiments.corpora.grammar import NAME; print(NAME)')"
if [[ "$attention" != @(mha|mixhead-a) ]]; then # asking for the others takes two seconds
    presets="$(python -c 'from fairseq_lowrank.attention import PRESETS; print(*PRESETS)')"
    [[ " $presets " == *" $attention "* ]] || refuse "--attention $attention: expected one of $presets"
fi

switch SMOKE
rows=("$attention")
[ "$attention" = mha ] || rows+=(mha)
SEED=1 SEEDS="" ROWS="${rows[*]}"
if [ "$data" = multi30k ]; then
    RESULTS="$LOWRANK_WORK${SMOKE:+/smoke}/quickstart/multi30k.jsonl"
    source "$ROOT/examples/multi30k/compare.sh" >&2
else
    PRECISION="${PRECISION-}"
    source "$ROOT/examples/common.sh"
    PAPER=quickstart TABLE=grammar CORPUS="$grammar" GENERATE="--beam 5 --max-len-a 1.5 --max-len-b 10" KIND=translation
    COMMON=(
        $(layers 2) $(width 128) $(ffn 256) $(heads 4) --share-decoder-input-output-embed
        --dropout 0.1 --criterion label_smoothed_cross_entropy --label-smoothing 0.1
        --optimizer adam --adam-betas 0.9,0.98 --lr 3e-3 --lr-scheduler inverse_sqrt --warmup-updates 300
        $(batch 1024 1024) --max-epoch 3 --no-epoch-checkpoints
    )
    for name in "${rows[@]}"; do row "$name" --arch lowrank_transformer_iwslt_de_en --attention "$name"; done
    # The file is named for the run, so that other flags, or another grammar, start over.
    RESULTS=""
    run="$(run_folder "$attention")" # its failure ends the script here
    RESULTS="$LOWRANK_WORK${SMOKE:+/smoke}/quickstart/$(basename "$run").jsonl"
    at_once
    translation_rows >&2
fi
[ -z "$DRY_RUN" ] || exit 0

run="$(run_folder "$attention")" corpus="$(data_folder "$attention")"
# if a row has no line, or one with other flags than now, the recipe has said so
for name in "${rows[@]}"; do
    grep -qsF "\"row\": \"$name\"" "$RESULTS" && [ -e "$(run_folder "$name")/generate-test.out" ] || exit 1
done
(DRY_RUN=1 && translation_rows) 2>&1 | sed 's/^+ //' | awk '!seen[$0]++' >"$run/commands"
echo >&2
python "$ROOT/examples/quickstart/report.py" "${rows[@]}" --results "$RESULTS" --commands "$run/commands" \
    --checkpoint "$run/checkpoints/checkpoint_best.pt" --generated "$run/generate-test.out" \
    --sources "$corpus/tok/test.de" --references "$corpus/tok/test.en"
