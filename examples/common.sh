# Sourced by every recipe. A recipe says which paper and table it runs, its common flags and its rows; this does the rest:
#
#   source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
#   PAPER=mixhead TABLE=4 SPLIT=test_2016_flickr CORPUS=multi30k
#   COMMON=(--max-tokens 4096 …)                 fairseq-train flags of every row
#   row mha --arch lowrank_transformer_iwslt_de_en --attention mha
#   translation_rows
#
# From outside: ROWS="mha mixhead-a" (a selection), SEED=1, THREADS=2, SMOKE=1 (first and last row, small and short, in
# minutes), DRY_RUN=1 (print the commands only), RESULTS=file.jsonl, EXTRA="--fp16 …" (more fairseq-train flags),
# LOWRANK_DATA (published corpora), LOWRANK_WORK (prepared corpora, checkpoints, logs; outside the repository).
# A row whose line is in RESULTS is skipped; one that was interrupted goes on from its last checkpoint.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
SEED="${SEED:-1}" SMOKE="${SMOKE:-}" DRY_RUN="${DRY_RUN:-}" EXTRA="${EXTRA:-}"
export OMP_NUM_THREADS="${THREADS:-$(nproc)}"
ROW_NAMES=()
declare -A ROW_FLAGS ROW_CORPUS

# row NAME FLAGS…: declare a row; it is trained on the CORPUS set at this moment.
row() {
    ROW_NAMES+=("$1")
    ROW_CORPUS["$1"]="$CORPUS"
    ROW_FLAGS["$1"]="${*:2}"
}

# heads H [DECODER_H]: flags for H attention heads everywhere.
heads() { echo "--encoder-attention-heads $1 --decoder-attention-heads ${2:-$1}"; }

# logged FILE COMMAND…: print the command and, unless this is a dry run, run it: all it says goes to FILE, its epochs to
# the terminal too.
logged() {
    printf '+ %s\n' "${*:2}" >&2
    if [ -n "$DRY_RUN" ]; then return; fi
    "${@:2}" 2>&1 | tee -a "$1" | { grep --line-buffered -E 'epoch [0-9]+ \|' >&2 || true; } || {
        echo "failed; the end of $1:" >&2
        tail -n 5 "$1" >&2
        return 1
    }
}

# SMOKE=1 changes data (a slice of Multi30k), sizes and updates, nothing else, and only here.
smoke_translation() { # HEADS
    local width=$(($1 * 4 > 32 ? $1 * 4 : 32))
    echo "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim $width --decoder-embed-dim $width" \
        "--encoder-ffn-embed-dim 64 --decoder-ffn-embed-dim 64 --max-update 20 --warmup-updates 5 --max-tokens 1024"
}

results_file() {
    if [ -n "${RESULTS:-}" ]; then echo "$RESULTS"
    elif [ -n "$SMOKE" ]; then echo "$LOWRANK_WORK/smoke/results/$PAPER.jsonl"
    else echo "$ROOT/results/$PAPER.jsonl"; fi
}

results() { python -m fairseq_lowrank.data.results "$@"; }

# selected_rows: the rows to run, after ROWS, SMOKE and what is finished already.
selected_rows() {
    local names=("${ROW_NAMES[@]}") finished name
    if [ -n "$SMOKE" ]; then names=("${names[0]}" "${names[-1]}"); fi
    if [ -n "${ROWS:-}" ]; then read -ra names <<<"$ROWS"; fi
    finished=" $(results finished --file "$(results_file)" --paper "$PAPER" --table "$TABLE" --seed "$SEED" | tr '\n' ' ') "
    for name in "${names[@]}"; do
        if [ -z "${ROW_FLAGS[$name]:-}" ]; then
            echo "no row '$name' here; rows: ${ROW_NAMES[*]}" >&2
            return 2
        fi
        if [[ -z "$DRY_RUN" && "$finished" == *" $name "* ]]; then
            echo "$name (seed $SEED): done already, see $(results_file)" >&2
        else
            echo "$name"
        fi
    done
}

# train DATA RUN FLAGS…: fairseq-train into RUN, going on where it stopped.
train() {
    logged "$2/train.log" fairseq-train "$1" --user-dir "$ROOT/fairseq_lowrank" --save-dir "$2/checkpoints" "${@:3}"
}

# generate DATA RUN: beam search on the test set with the best checkpoint, into RUN/generate.out.
generate() {
    rm -f "$2/generate.out"
    logged "$2/generate.out" fairseq-generate "$1" --user-dir "$ROOT/fairseq_lowrank" \
        --path "$2/checkpoints/checkpoint_best.pt" --gen-subset test --beam 5 --max-tokens 4096 \
        --remove-bpe sentencepiece --seed "$SEED"
}

translation_rows() {
    local name selected
    selected="$(selected_rows)"
    for name in $selected; do translation_row "$name"; done
}

translation_row() {
    local name="$1" corpus="${ROW_CORPUS[$1]}" flags data run
    flags="${ROW_FLAGS[$name]} ${COMMON[*]} --seed $SEED $EXTRA"
    if [ -n "$SMOKE" ]; then flags+=" $(smoke_translation "$(last_value --encoder-attention-heads $flags)")" corpus=multi30k; fi
    flags="$(xargs <<<"$flags")"
    data="$LOWRANK_WORK/data/$corpus"
    run="$LOWRANK_WORK/${SMOKE:+smoke/}runs/$PAPER-$TABLE/$name-seed$SEED"
    if [ -n "$DRY_RUN" ]; then
        train "$data/bin" "$run" $flags
        generate "$data/bin" "$run"
        return
    fi
    mkdir -p "$run"
    (
        flock -n 9 || { echo "$name (seed $SEED): another process is at it" >&2; exit 0; }
        "$ROOT/scripts/prepare_$corpus.sh" >/dev/null
        train "$data/bin" "$run" $flags
        generate "$data/bin" "$run"
        results bleu --file "$(results_file)" --paper "$PAPER" --table "$TABLE" --row "$name" --seed "$SEED" \
            --flags "$flags" --log "$run/train.log" --generated "$run/generate.out" --references "$data/tok/test.en" \
            --split "$SPLIT" ${SMOKE:+--smoke}
    ) 9>"$run/lock"
}

# last_value FLAG FLAGS…: the value that counts where a flag is given several times.
last_value() {
    local flag="$1" value=4
    shift
    while [ $# -gt 0 ]; do
        if [ "$1" = "$flag" ]; then value="$2"; fi
        shift
    done
    echo "$value"
}
