# Sourced by every recipe. A recipe names its paper and table, sets the flags that all rows share, and lists its rows:
#
#   source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
#   PAPER=mixhead TABLE=table4 CORPUS=iwslt14
#   COMMON=(--max-tokens 4096 …)                               flags of fairseq-train
#   row h4-mha --arch lowrank_transformer_iwslt_de_en --attention mha
#   translation_rows                                           or language_model_rows
#
# From outside:
#   ROWS="h4-mha h4-mixhead-a"   only these rows                 SEED=1
#   DRY_RUN=1                    print the commands only         THREADS=2
#   SMOKE=1                      first and last row, small and short, in minutes, kept apart from real results
#   PRECISION="--bf16"           precision of training (default: --fp16 on GPUs, as in fairseq's recipes; "": float32)
#   EXTRA="--patience 5 …"       more flags of fairseq-train
#   PREPARE="--download …"       flags of the preparation script
#   GPUS=2                       train on the first 2 GPUs (default: all that CUDA_VISIBLE_DEVICES leaves, as fairseq does)
#   RESULTS=FILE                 where lines go (default: results/PAPER.jsonl)
#   LOWRANK_DATA, LOWRANK_WORK   published corpora; what is made of them, checkpoints and logs
#
# A row whose line is in RESULTS is skipped; one that was interrupted goes on from its last checkpoint. Several processes may
# run a recipe at once: each takes the rows at which no other one is.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
SEED="${SEED:-1}" SMOKE="${SMOKE:-}" DRY_RUN="${DRY_RUN:-}" EXTRA="${EXTRA:-}"
export OMP_NUM_THREADS="${THREADS:-$(nproc)}"
USER_DIR="$ROOT/fairseq_lowrank"
LOGGING=(--no-progress-bar --log-format simple --log-interval 50)
ROW_NAMES=() BUSY=()
declare -A ROW_FLAGS ROW_CORPUS

# ---- GPUs: fairseq-train uses all that it sees, so batches are split over as many

visible_gpus() {
    local there gpu
    there="$(nvidia-smi -L 2>/dev/null | sed -n 's/^GPU \([0-9]*\):.*/\1/p')" || return 0
    for gpu in $(tr , ' ' <<<"${CUDA_VISIBLE_DEVICES-$there}"); do
        # CUDA too ends the list at the first that is not there; names it takes beside numbers.
        [[ " ${there//$'\n'/ } " == *" $gpu "* || "$gpu" == [GM]* ]] || break
        echo "$gpu"
    done
}
VISIBLE_GPUS=($(visible_gpus))
GPU_COUNT="${GPUS:-${#VISIBLE_GPUS[@]}}"
if [[ ! "$GPU_COUNT" =~ ^[0-9]+$ ]] || { [ -z "$DRY_RUN" ] && ((GPU_COUNT > 1 && GPU_COUNT > ${#VISIBLE_GPUS[@]})); }; then
    echo "GPUS=$GPU_COUNT: expected a number up to ${#VISIBLE_GPUS[@]}, the GPUs that are here" >&2
    exit 2
fi
if ((GPU_COUNT > 0)); then PRECISION="${PRECISION---fp16}"; fi
if [ -n "${GPUS:-}" ]; then
    export CUDA_VISIBLE_DEVICES="$(IFS=, && echo "${VISIBLE_GPUS[*]:0:GPU_COUNT}")"
fi

# ---- what recipes call

# row NAME FLAGS…: declare a row, trained on the CORPUS that is set now.
row() {
    ROW_NAMES+=("$1")
    ROW_CORPUS["$1"]="$CORPUS"
    ROW_FLAGS["$1"]="${*:2}"
}

# heads N: N attention heads in encoder and decoder.
heads() { echo "--encoder-attention-heads $1 --decoder-attention-heads $1"; }

# layers N, width N: N layers, or embeddings of size N, in encoder and decoder.
layers() { echo "--encoder-layers $1 --decoder-layers $1"; }
width() { echo "--encoder-embed-dim $1 --decoder-embed-dim $1"; }
ffn() { echo "--encoder-ffn-embed-dim $1 --decoder-ffn-embed-dim $1"; }

# lm_width N: a language model of width N throughout.
lm_width() { echo "--decoder-embed-dim $1 --decoder-input-dim $1 --decoder-output-dim $1"; }

# batch N TOTAL [BLOCK]: an update sees TOTAL tokens, or next to it, in steps of at most N tokens on each GPU, a multiple
# of BLOCK: of a language model the length of its sequences, since a step takes them whole.
batch() {
    local gpus=$((GPU_COUNT > 1 ? GPU_COUNT : 1)) block="${3:-1}" fewest updates tokens off nearest="" flags=""
    fewest=$(($2 / ($1 * gpus)))
    for ((updates = fewest > 0 ? fewest : 1; updates <= 2 * (fewest + 1); updates++)); do
        tokens=$(((2 * $2 / (updates * gpus * block) + 1) / 2 * block))
        tokens=$((tokens > block ? tokens : block))
        off=$((tokens * updates * gpus - $2))
        off=${off#-}
        if ((tokens <= $1 && off < ${nearest:-off + 1})); then
            nearest=$off flags="--max-tokens $tokens --update-freq $updates"
            if ((100 * off <= $2)); then break; fi
        fi
    done
    echo "$flags"
}

# translation_rows: run the rows and score them on the test set with beam search (GENERATE: flags of fairseq-generate,
# default --beam 5), and on the validation set too where VALID is set.
translation_rows() { run_rows translation; }

# language_model_rows: run the rows and score them with fairseq-eval-lm.
language_model_rows() { run_rows language_model; }

# report OPTIONS…: the results of this paper beside the published values.
report() {
    no_other_process_at ${ROWS:-"${ROW_NAMES[@]}"}
    command_line report "$(results_file)" --paper "$PAPER" "$@"
}

# spectra NAME ROWS…: spectra of the attention of rows on the test set, in a folder beside the lines of results. A row that has
# its line but no checkpoint here, as in a clone of the repository, is trained for it and gets no second line.
spectra() {
    local name run checkpoints=()
    for name in "${@:2}"; do
        run="$(run_folder "$name")"
        checkpoints+=("$run/checkpoints/checkpoint_best.pt")
        if [ -n "$DRY_RUN" ]; then continue; fi
        # An empty file: its training was interrupted.
        if [ ! -e "${checkpoints[-1]}" ] || { [ -e "$run/trained" ] && [ ! -s "$run/trained" ]; }; then
            run_row "$name"
        fi
    done
    no_other_process_at "${@:2}"
    command_line spectrum "${checkpoints[@]}" --labels "${@:2}" --subset test --sequences "${SEQUENCES:-16}" \
        --output "${OUTPUT:-$(dirname "$(results_file)")}/$1"
}

# command_line COMMAND OPTIONS…: print a command of fairseq-lowrank and run it, unless this is a dry run.
command_line() {
    printf '+ fairseq-lowrank %s\n' "$*" >&2
    if [ -z "$DRY_RUN" ]; then python -m fairseq_lowrank.cli "$@"; fi
}

# ---- what a smoke run changes: the corpus (Multi30k, a part of Brown), sizes and lengths; it is changed nowhere else

smoke_translation() { # FLAGS…
    local wide=$((8 * $(last_value --encoder-attention-heads 4 "$@")))
    echo "$(layers 1) $(width $wide) $(ffn 64) --max-tokens 1024 --update-freq 1 --max-update 20 --warmup-updates 5"
}

smoke_language_model() { # FLAGS…
    local wide=$((8 * $(last_value --decoder-attention-heads 8 "$@")))
    case " $* " in *" --head-dim "*) wide=64 ;; esac # heads need not divide it then
    echo "--decoder-layers 1 $(lm_width $wide) --decoder-ffn-embed-dim 64 --tokens-per-sample 32 --max-tokens 512" \
        "--update-freq 1 --max-update 10 --warmup-updates 2"
    case " $* " in *" lowrank_transformer_lm_wiki103 "* | *_lm_gbw* | *--adaptive-input*)
        echo "--adaptive-input-cutoff 200,1000 --adaptive-softmax-cutoff 200,1000" ;;
    esac
    case " $* " in *--embed-rank*) echo "--embed-rank 4" ;; esac
}

smoke_corpus() { # KIND CORPUS
    case "$1 $2" in
        "translation "*-x*) echo "multi30k-x${2##*-x}" ;;
        translation*) echo multi30k ;;
        *-bpe*) echo "brown-head500-bpe$((${2##*-bpe} < 2000 ? ${2##*-bpe} : 2000))" ;;
        *) echo brown-head500 ;;
    esac
}

# ---- the parts of a run

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

# prepare CORPUS: the preparation script for a name such as iwslt14, multi30k-x10, wikitext-103-bpe2000 or brown-head500.
prepare() {
    local name="$1" flags=(${PREPARE:---workers 1})
    if [[ "$name" =~ ^(.+)-x([0-9]+)$ ]]; then name="${BASH_REMATCH[1]}" flags+=(--join "${BASH_REMATCH[2]}"); fi
    if [[ "$name" =~ ^(.+)-bpe([0-9]+)$ ]]; then name="${BASH_REMATCH[1]}" flags+=(--pieces "${BASH_REMATCH[2]}"); fi
    if [[ "$name" =~ ^(.+)-head([0-9]+)$ ]]; then name="${BASH_REMATCH[1]}" flags+=(--head "${BASH_REMATCH[2]}"); fi
    if [[ "$name" =~ ^(wikitext)-([0-9]+)$ ]]; then name=wikitext flags+=(--size "${BASH_REMATCH[2]}"); fi
    printf '+ %s\n' "scripts/prepare_$name.sh ${flags[*]}" >&2
    if [ -z "$DRY_RUN" ]; then "$ROOT/scripts/prepare_$name.sh" "${flags[@]}" >/dev/null; fi
}

# train DATA RUN FLAGS…: fairseq-train into RUN, going on where it stopped. RUN/trained holds the flags of a run that came
# to its end and is empty before that: started again, fairseq would add an update before it looks at --max-update.
train() {
    local trained="$2/trained"
    if [ -z "$DRY_RUN" ] && [ -e "$2/checkpoints/checkpoint_best.pt" ] && [ "$(cat "$trained" 2>&1)" = "${*:3}" ]; then
        echo "$name (seed $SEED): trained already, see $2" >&2
        return
    fi
    if [ -z "$DRY_RUN" ]; then : >"$trained"; fi
    logged "$2/train.log" fairseq-train "$1" --user-dir "$USER_DIR" --save-dir "$2/checkpoints" "${@:3}"
    if [ -z "$DRY_RUN" ]; then echo "${*:3}" >"$trained"; fi
}

# generate DATA RUN SPLIT: beam search with the best checkpoint, into RUN/generate-SPLIT.out.
generate() {
    local pieces=subword_nmt
    case "$corpus" in multi30k*) pieces=sentencepiece ;; esac
    if [ -z "$DRY_RUN" ]; then rm -f "$2/generate-$3.out"; fi
    logged "$2/generate-$3.out" fairseq-generate "$1" --user-dir "$USER_DIR" --gen-subset "$3" --seed "$SEED" \
        --path "$2/checkpoints/checkpoint_best.pt" --remove-bpe "$pieces" --max-tokens 4096 ${GENERATE:---beam 5} \
        ${SMOKE:+--max-len-a 0 --max-len-b 10} # a model that has hardly begun does not know when to stop
}

# evaluate DATA RUN SPLIT FLAGS…: perplexity of the best checkpoint, into RUN/evaluate-SPLIT.out.
evaluate() {
    if [ -z "$DRY_RUN" ]; then rm -f "$2/evaluate-$3.out"; fi
    logged "$2/evaluate-$3.out" fairseq-eval-lm "$1" --user-dir "$USER_DIR" --gen-subset "$3" "${@:4}" \
        --path "$2/checkpoints/checkpoint_best.pt"
}

results() { python -m fairseq_lowrank.data.results "$@"; }

results_file() {
    if [ -n "${RESULTS:-}" ]; then
        echo "$RESULTS"
    elif [ -n "$SMOKE" ]; then
        echo "$LOWRANK_WORK/smoke/results/$PAPER.jsonl"
    else
        echo "$ROOT/results/$PAPER.jsonl"
    fi
}

# selected_rows: the rows to run: all, ROWS, or the outermost for SMOKE, less those whose line is there.
selected_rows() {
    local names=("${ROW_NAMES[@]}") finished="" name
    if [ -n "$SMOKE" ]; then names=("${ROW_NAMES[0]}" "${ROW_NAMES[-1]}"); fi
    if [ -n "${ROWS:-}" ]; then read -ra names <<<"$ROWS"; fi
    if [ -z "$DRY_RUN" ]; then
        finished="$(results finished --file "$(results_file)" --paper "$PAPER" --table "$TABLE" --seed "$SEED" \
            ${SMOKE:+--smoke})"
    fi
    for name in "${names[@]}"; do
        if [ -z "${ROW_FLAGS[$name]:-}" ]; then
            echo "no row '$name' here; rows: ${ROW_NAMES[*]}" >&2
            return 2
        elif grep -qxF -e "$name" <<<"$finished"; then
            echo "$name (seed $SEED): done already, see $(results_file); RESULTS=OTHER.jsonl runs it all the same" >&2
        else
            echo "$name"
        fi
    done
}

# last_value FLAG DEFAULT FLAGS…: the value of a flag; where it is given several times, the last.
last_value() {
    local flag="$1" value="$2"
    shift 2
    while [ $# -gt 1 ]; do
        if [ "$1" = "$flag" ]; then value="$2"; fi
        shift
    done
    echo "$value"
}

run_rows() { # KIND
    local name selected
    KIND="$1"
    selected="$(selected_rows)"
    for name in $selected; do run_row "$name" "score_$KIND"; done
}

run_folder() { echo "$LOWRANK_WORK/${SMOKE:+smoke/}runs/$PAPER-$TABLE/$1-seed$SEED"; }

run_row() { # NAME [SCORE]
    local name="$1" corpus="${ROW_CORPUS[$1]}" flags data run
    read -ra flags <<<"${ROW_FLAGS[$name]} ${COMMON[*]} ${PRECISION:-} --seed $SEED ${LOGGING[*]} $EXTRA"
    if [ -n "$SMOKE" ]; then
        corpus="$(smoke_corpus "$KIND" "$corpus")"
        flags+=($("smoke_$KIND" "${flags[@]}"))
    fi
    data="$LOWRANK_WORK/data/$corpus"
    run="$(run_folder "$name")"
    if [ -z "$DRY_RUN" ]; then mkdir -p "$run"; else run_parts "${@:2}"; return; fi
    {
        if flock -n 9; then
            run_parts "${@:2}"
        else
            echo "$name (seed $SEED): another process is at it" >&2
            BUSY+=("$name")
        fi
    } 9>"$run/lock"
}

run_parts() { # [SCORE]; the rest is run_row's
    prepare "$corpus"
    train "$data/bin" "$run" "${flags[@]}"
    "$@"
}

# no_other_process_at ROWS…: fail if another process is at one of these rows, or was when its turn came here.
no_other_process_at() {
    local name lock
    if [ -n "$DRY_RUN" ]; then return; fi
    for name in "$@"; do
        lock="$(run_folder "$name")/lock"
        if [[ " ${BUSY[*]} " == *" $name "* ]] || { [ -e "$lock" ] && ! flock -n "$lock" true; }; then
            echo "$PAPER $TABLE: another process is at $name (seed $SEED); call this again when that has ended" >&2
            return 1
        fi
    done
}

score_translation() {
    local target options=() split
    target="$(last_value --target-lang en "${flags[@]}")"
    for split in ${VALID:+valid} test; do generate "$data/bin" "$run" "$split"; done
    if [ -n "${VALID:-}" ]; then options+=(--valid "$run/generate-valid.out" --valid-references "$data/tok/valid.$target"); fi
    # The publisher's own references, where the corpus keeps them: sacrebleu then sees detokenised text.
    if [ -f "$data/raw/test.$target" ]; then options+=(--raw-references "$data/raw/test.$target" --language "$target"); fi
    record bleu --generated "$run/generate-test.out" --references "$data/tok/test.$target" "${options[@]}"
}

# The context window is in proportion to fairseq's 400 of 512.
score_language_model() {
    local length
    length="$(last_value --tokens-per-sample 512 "${flags[@]}")"
    evaluate "$data/bin" "$run" test --tokens-per-sample "$length" --context-window $((length * 25 / 32)) \
        --max-tokens "$((length > 2048 ? length : 2048))"
    record perplexity --evaluated "$run/evaluate-test.out"
}

record() { # METRIC OPTIONS…
    if [ -n "$DRY_RUN" ]; then return; fi
    results "$1" --file "$(results_file)" --paper "$PAPER" --table "$TABLE" --row "$name" --seed "$SEED" \
        --flags "${flags[*]}" --log "$run/train.log" --checkpoint "$run/checkpoints/checkpoint_best.pt" --split "${SPLIT:-test}" "${@:2}" ${SMOKE:+--smoke}
}
