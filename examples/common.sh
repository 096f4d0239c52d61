# Sourced by every recipe. A recipe names its paper and table, sets the flags that all rows share, and lists its rows:
#
#   source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
#   PAPER=mixhead TABLE=table4 CORPUS=iwslt14
#   COMMON=(--max-tokens 4096 …)                               flags of fairseq-train
#   row h4-mha --arch lowrank_transformer_iwslt_de_en --attention mha
#   translation_rows                                           or language_model_rows, fine_tuning_rows
#
# A recipe may also set PLUGIN, a folder of the repository that fairseq gets as --user-dir instead of the package. FIT=2000 scores
# each sentence of the validation and test sets, and of 2,000 training pairs without dropout.
#
# Environment variables:
#   ROWS="h4-mha h4-mixhead-a"   only these rows                 SEED=1, or SEEDS="1 2 3"
#   DRY_RUN=1                    print the commands only         THREADS=2
#   COST=1                       print what each row costs, and run nothing: tokens, hours on one H100 (with GPUS=8 on 8 too) and on
#                                2 cores, memory, disk, downloads
#   SMOKE=1                      first and last row, small and short, in minutes, kept apart from real results
#   PRECISION="--bf16"           precision of training (default: --fp16 on GPUs, as in fairseq's recipes; "": float32)
#   EXTRA="--patience 5 …"       more flags of fairseq-train, for rows and not for the pre-trainings that they start from
#   PREPARE="--download …"       flags of the preparation script
#   BERT=FOLDER                  a published BERT in transformers' layout (config.json, vocab.txt, model.safetensors) in place of the
#                                one that rows start from; lines are of a table named for it, and SMOKE=1 starts from it too
#   RERUN=1                      train again the rows that other code trained, instead of refusing them
#   DIRTY=1                      train with files of the clone that are changed or new and not committed, instead of refusing them
#   GPUS=2                       train on the first 2 GPUs (default: all that CUDA_VISIBLE_DEVICES leaves, as fairseq does)
#   RESULTS=FILE                 where lines go (default: results/PAPER.jsonl), with logs in the folder logs next to it. Rows
#                                without a line in FILE are trained for it
#   JOBS=2                       train as many rows at the same time, in a thread each unless THREADS says otherwise; "cores": as
#                                many as the cores give with these threads. The quickstart and compare.sh do so on CPUs
#   ALONE=1                      nothing else runs on this machine: reports then show the speed of training
#   LINEAR=torch                 torch's own linear layers; "onednn": those of oneDNN. By default 0.1 s are measured on CPUs, and
#                                the faster is taken. Lines record it
#   LOWRANK_ENABLE               optional patches of fairseq, in place of those of environment.sh; lines record them
#   LOWRANK_DATA                 folder of published corpora
#   LOWRANK_WORK                 folder of prepared corpora, checkpoints and logs
#
# Each ten seconds a line says how far a training, a translation or another step is. EXTRA="--log-interval 100" changes how often
# fairseq logs, by default at least ten times in an epoch.
#
# A row whose line is in RESULTS is skipped. An interrupted row continues from its last checkpoint. Several processes may run a
# recipe at once: each skips the rows that another one is running. The folder of a run is named for its flags, so another EXTRA
# or PRECISION trains in another folder. A checkpoint that other code trained is refused.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
no_arguments "$0" "${BASH_SOURCE[0]}" "$@"
if [ "${LIST_ROWS:-}" != 1 ]; then needs_setup; fi
switch SMOKE
switch DRY_RUN
switch COST
COMMON=() KIND="" BASE="" PLUGIN="" FIT="" SPLIT=""
DECLARED=() # rows and pre-trainings, each as the number of its words and these words

# ---- GPUs: fairseq-train uses all that it sees, so batches are split over as many

visible_gpus() {
    local there gpu
    there="$(nvidia-smi -L 2>/dev/null | sed -n 's/^GPU \([0-9]*\):.*/\1/p')" || return 0
    for gpu in $(tr , ' ' <<<"${CUDA_VISIBLE_DEVICES-$there}"); do
        # CUDA too ends the list at the first that is not there; it takes names and numbers.
        [[ " ${there//$'\n'/ } " == *" $gpu "* || "$gpu" == [GM]* ]] || break
        echo "$gpu"
    done
}
VISIBLE_GPUS=($(visible_gpus))
GPU_COUNT="${GPUS:-${#VISIBLE_GPUS[@]}}"
if [[ ! "$GPU_COUNT" =~ ^(0|[1-9][0-9]{0,5})$ ]] || { [ -z "$DRY_RUN$COST" ] && ((GPU_COUNT > 1 && GPU_COUNT > ${#VISIBLE_GPUS[@]})); }; then
    echo "GPUS=$GPU_COUNT: expected a number up to ${#VISIBLE_GPUS[@]}, the GPUs that are here" >&2
    exit 2
fi
# costs are those of one GPU, and with GPUS=8 of as many too
if [ -n "$COST" ] && ((GPU_COUNT > 1)); then export COST_GPUS="$GPU_COUNT" GPU_COUNT=1; fi
if ((GPU_COUNT > 0)); then PRECISION="${PRECISION---fp16}"; fi
# One process leaves no batch out of a last update, so its lines have the patches of earlier lines.
if ((GPU_COUNT <= 1)); then LOWRANK_ENABLE="${LOWRANK_ENABLE%,last-update}"; fi
if [ -n "${GPUS:-}" ]; then
    export CUDA_VISIBLE_DEVICES="$(IFS=, && echo "${VISIBLE_GPUS[*]:0:GPU_COUNT}")"
fi

# ---- what recipes call

# record WORDS…: print a record for the engine, the number of its words and these words, each ended by NUL.
record() { printf '%s\0' $# "$@"; }

# row NAME FLAGS…: declare a row, trained on the CORPUS that is set now. LABEL@TASK is a table's row LABEL fine-tuned for a
# task, from the pre-training BASE that is set now.
row() { DECLARED+=($(($# + 4)) row "$1" "$CORPUS" "$BASE" "" "${@:2}"); }

# pretraining NAME FLAGS…: declare what rows start from, trained once on the CORPUS that is set now, and with seed 1.
pretraining() { DECLARED+=($(($# + 4)) pretraining "$1" "$CORPUS" "" "" "${@:2}"); }

# continued NAME BASE FLAGS…: the same, where the optimizer and the count of updates are continued from the pre-training BASE.
continued() { DECLARED+=($(($# + 3)) pretraining "$1" "$CORPUS" "$2" "" "${@:3}"); }

# published NAME CHECKPOINT FLAGS…: the same for a published model, which only trials train.
published() { DECLARED+=($(($# + 3)) pretraining "$1" "$CORPUS" "" "${@:2}"); }

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
    if ((10 * nearest > $2)); then
        echo "an update on $gpus GPUs has $nearest tokens more or fewer than the $2 of the recipe, because a step has whole" \
            "sequences. Set GPUS=N to use fewer GPUs." >&2
    fi
    echo "$flags"
}

# at_once: train as many rows at the same time as there are cores, unless JOBS says otherwise, on CPUs.
at_once() {
    if ((GPU_COUNT == 0)) && [ "${ALONE:-0}" != 1 ]; then JOBS="${JOBS:-cores}"; fi
}

# translation_rows: run the rows and score them on the test set with beam search (GENERATE: flags of fairseq-generate,
# default --beam 5), and on the validation set too where VALID is set.
translation_rows() {
    KIND=translation
    engine rows
}

# language_model_rows: run the rows and score them with fairseq-eval-lm (EVALUATE: more flags of it, which win over the
# context window of 25/32 of a block that is the default; METRIC=loss: the loss in nats instead of the perplexity).
language_model_rows() {
    KIND=language-model
    engine rows
}

# language_model_sizes: print how large the models of the rows are.
language_model_sizes() {
    KIND=language-model
    engine sizes
}

# masked_language_model_rows: run the rows and score them with fairseq-validate.
masked_language_model_rows() {
    KIND=masked-language-model
    engine rows
}

# fine_tuning_rows: run the rows, each after the pre-training that it starts from, and score them with the task's own measures.
fine_tuning_rows() {
    KIND=fine-tuning
    engine rows
}

# report OPTIONS…: the results of this paper next to the published values.
report() { engine report "$@"; }

# compare OPTIONS…: differences of rows of this table, with their intervals.
compare() { engine compare "$@"; }

# spectra NAME [OPTIONS…] ROWS…: spectra of the attention of rows on the test set, in a folder next to the lines of results. A row that has
# its line but no checkpoint here, as in a clone of the repository, is trained for it and gets no second line.
spectra() { engine spectra "$@"; }

# run_folder ROW: print where a row is trained.
run_folder() { engine folder "$1"; }

# data_folder ROW: print where its corpus is, prepared.
data_folder() { engine data "$1"; }

# results_file: print where lines go.
results_file() { engine results; }

# list_rows: print the names of the declared rows, and end.
list_rows() {
    local place=0
    while ((place < ${#DECLARED[@]})); do
        if [ "${DECLARED[place + 1]}" = row ]; then echo "row: ${DECLARED[place + 2]}"; fi
        ((place += DECLARED[place] + 1))
    done
    exit
}

# engine COMMAND …: hand rows and settings to the engine.
engine() {
    if [ "${LIST_ROWS:-}" = 1 ]; then list_rows; fi
    if [ -n "$COST" ]; then
        case "$1" in rows) set -- cost ;; report | compare | spectra | sizes) return ;; esac
    fi
    export ROWS SEED SEEDS JOBS SMOKE DRY_RUN EXTRA PRECISION PREPARE GENERATE EVALUATE METRIC VALID RESULTS ALONE RERUN DIRTY THREADS
    export SEQUENCES OUTPUT BERT
    {
        record paper "$PAPER"
        record table "$TABLE"
        record split "${SPLIT:-test}"
        record plugin "${PLUGIN:-fairseq_lowrank}"
        record fit "${FIT:-0}"
        record common "${COMMON[@]}"
        if ((${#DECLARED[@]})); then printf '%s\0' "${DECLARED[@]}"; fi
    } | python -m experiments.recipes --kind "$KIND" --root "$ROOT" "$@"
}
