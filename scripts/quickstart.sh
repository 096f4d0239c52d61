#!/usr/bin/env bash
# Train and try a small German-English translation model with Mixhead attention, from nothing, in a few minutes.
#
#   scripts/quickstart.sh [--data grammar|multi30k] [--attention PRESET]
#
#   --data grammar       a corpus made up on the spot by a small grammar (default; nothing to download, about 3 minutes)
#   --data multi30k      real image captions: row PRESET of examples/multi30k/compare.sh (about 30 minutes); they are in
#                        FOLDER/multi30k with LOWRANK_DATA=FOLDER, or fetched with PREPARE="--download"
#   --attention PRESET   the kind of attention: mixhead-b (default), mha, mixhead-a, mhe-mul, mqa, …
#
# Sets up .venv first (SETUP=0: uses the Python on PATH), then makes the corpus, trains, translates the test set and
# shows ten translations, the parameters against plain multi-head attention, the commands, and last the BLEU score.
# Finished steps are kept in LOWRANK_WORK (default ~/.cache/fairseq_lowrank) and skipped the next time; training that
# was interrupted goes on from its last epoch. THREADS=2 sets the number of threads; SMOKE=1 only shows that everything
# runs: a fraction of the data, one epoch, a useless model.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

usage() { sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "${BASH_SOURCE[0]}"; }
refuse() {
    echo "quickstart: error: $*" >&2
    exit 2
}

data=grammar attention=mixhead-b
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

[ "${SETUP:-1}" = 0 ] || "$root/scripts/setup.sh"
source "$root/examples/environment.sh"
presets="$(python -c 'from fairseq_lowrank.attention import PRESETS; print(*PRESETS)')"
[[ " $presets " == *" $attention "* ]] || refuse "--attention $attention: expected one of $presets"

switch SMOKE
show() { python "$ROOT/examples/quickstart/report.py" "$@"; }

if [ "$data" = multi30k ]; then
    ROWS="$attention" SEED=1 RESULTS="$LOWRANK_WORK${SMOKE:+/smoke}/quickstart/multi30k.jsonl"
    source "$ROOT/examples/multi30k/compare.sh"
    run="$(run_folder "$ROWS")"
    # where this row has no line, or one with other flags than now, the recipe has said so
    grep -qsF "\"row\": \"$ROWS\"" "$RESULTS" && [ -e "$run/generate-test.out" ] || exit 1
    (DRY_RUN=1 && translation_rows) 2>&1 | sed 's/^+ //' >"$run/commands"
    show --data "$LOWRANK_WORK/data/multi30k/bin" --commands "$run/commands" --generated "$run/generate-test.out" \
        --checkpoint "$run/checkpoints/checkpoint_best.pt" \
        --sources "$LOWRANK_WORK/data/multi30k/tok/test.de" --references "$LOWRANK_WORK/data/multi30k/tok/test.en"
    exit
fi

threads="${THREADS:-$(nproc)}"
export OMP_NUM_THREADS=$((threads < 4 ? threads : 4)) # more do not help so small a model

width=128 layers=2 epochs=3 train_size=24000 warmup=300
if [ -n "${SMOKE:-}" ]; then width=32 layers=1 epochs=1 train_size=2000 warmup=10; fi
model=(
    --user-dir "$ROOT/fairseq_lowrank" --arch lowrank_transformer_iwslt_de_en --attention "$attention"
    --encoder-layers $layers --decoder-layers $layers --encoder-embed-dim $width --decoder-embed-dim $width
    --encoder-ffn-embed-dim $((2 * width)) --decoder-ffn-embed-dim $((2 * width))
    --encoder-attention-heads 4 --decoder-attention-heads 4 --share-decoder-input-output-embed
)
training=(
    --dropout 0.1 --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --optimizer adam --adam-betas 0.9,0.98 --lr 3e-3 --lr-scheduler inverse_sqrt --warmup-updates $warmup
    --max-tokens 1024 --max-epoch $epochs --seed 1 --no-epoch-checkpoints --log-format json --log-interval 5
)

# Folders are named for what made them, so a changed grammar or flag starts over, and nothing else does.
key() { cksum | cut -d ' ' -f 1; }
grammar=("$ROOT"/examples/quickstart/{lexicon,trees,german,english,corpus}.py)
corpus="$LOWRANK_WORK/quickstart/corpus-$(cat "${grammar[@]}" - <<<"$train_size" | key)"
run="$LOWRANK_WORK/quickstart/$attention-$(key <<<"$corpus ${model[*]} ${training[*]}")"
mkdir -p "$run"
: >"$run/commands"

# step NAME TITLE FOLDER COMMAND…: run a command whose results are in FOLDER, unless it has been run to its end.
step() {
    local done="$3/.$1-done"
    printf '%s\n' "${*:4}" >>"$run/commands"
    if [ -e "$done" ]; then
        echo "== $2: done before" >&2
        return
    fi
    echo "== $2" >&2
    "$1" "${@:4}"
    touch "$done"
}

# What each step does around its command: clear what an interrupted one left, keep the log, show progress.
make() { "$@" >&2; }
preprocess() {
    rm -rf "$corpus/bin"
    quietly "$corpus/preprocess.log" "$@"
}
train() { followed "$run/train.log" "$@"; }
generate() {
    rm -f "$run/generate.out"
    followed "$run/generate.out" "$@"
}
quietly() { "${@:2}" >"$1" 2>&1 || failed "$1"; }
followed() {
    PYTHONUNBUFFERED=1 "${@:2}" 2>&1 |
        python "$ROOT/examples/quickstart/progress.py" "$1" --epochs $epochs --sentences 500 || failed "$1"
}
failed() {
    echo "quickstart: error: that failed; the end of $1:" >&2
    tail -n 5 "$1" >&2
    exit 1
}

mkdir -p "$corpus"
step make "making the corpus" "$corpus" \
    python "$ROOT/examples/quickstart/corpus.py" "$corpus" --train-size $train_size
step preprocess "binarising it" "$corpus" \
    fairseq-preprocess --source-lang de --target-lang en --destdir "$corpus/bin" \
    --trainpref "$corpus/train" --validpref "$corpus/valid" --testpref "$corpus/test"
step train "training with --attention $attention, $epochs epochs" "$run" \
    fairseq-train "$corpus/bin" --save-dir "$run/checkpoints" "${model[@]}" "${training[@]}"
step generate "translating the test set, beam 5" "$run" \
    fairseq-generate "$corpus/bin" --user-dir "$ROOT/fairseq_lowrank" --path "$run/checkpoints/checkpoint_best.pt" \
    --beam 5 --max-len-a 1.5 --max-len-b 10 --batch-size 50
cat >>"$run/commands" <<END

your own sentences, in words of the corpus and with a space before each mark:
fairseq-interactive $corpus/bin --user-dir $ROOT/fairseq_lowrank --path $run/checkpoints/checkpoint_best.pt --beam 5
END
echo >&2
show --data "$corpus/bin" --sources "$corpus/test.de" --references "$corpus/test.en" \
    --generated "$run/generate.out" --checkpoint "$run/checkpoints/checkpoint_best.pt" --commands "$run/commands"
