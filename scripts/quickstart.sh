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
# Sets up .venv first (SETUP=0: takes .venv as it is or, without one, the Python on PATH), then makes the corpus, trains, translates the test set and
# shows ten translations, the parameters against plain multi-head attention, the commands, and last the BLEU score.
# Finished steps are kept in LOWRANK_WORK (default ~/.cache/fairseq_lowrank) and skipped the next time; training that
# was interrupted resumes from its last epoch. THREADS=2 sets the number of threads; SMOKE=1 only shows that everything
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
{
    read -r grammar
    read -r presets
} < <(python -c '
from fairseq_lowrank.attention import PRESETS
from experiments.corpora.grammar import NAME
print(NAME)
print(*PRESETS)')
[[ " $presets " == *" $attention "* ]] || refuse "--attention $attention: expected one of $presets"

switch SMOKE
SEED=1 ROWS="$attention"
if [ "$data" = multi30k ]; then
    RESULTS="$LOWRANK_WORK${SMOKE:+/smoke}/quickstart/multi30k.jsonl"
    source "$ROOT/examples/multi30k/compare.sh" >&2
else
    PRECISION="${PRECISION-}"
    source "$ROOT/examples/common.sh"
    threads="${THREADS:-$(nproc)}"
    THREADS=$((threads < 4 ? threads : 4)) # more do not help so small a model
    PAPER=quickstart TABLE=grammar CORPUS="$grammar" GENERATE="--beam 5 --max-len-a 1.5 --max-len-b 10" KIND=translation
    COMMON=(
        $(layers 2) $(width 128) $(ffn 256) $(heads 4) --share-decoder-input-output-embed
        --dropout 0.1 --criterion label_smoothed_cross_entropy --label-smoothing 0.1
        --optimizer adam --adam-betas 0.9,0.98 --lr 3e-3 --lr-scheduler inverse_sqrt --warmup-updates 300
        $(batch 1024 1024) --max-epoch 3 --no-epoch-checkpoints
    )
    row "$attention" --arch lowrank_transformer_iwslt_de_en --attention "$attention"
    # The file is named for the run, so that other flags, or another grammar, start over.
    RESULTS=""
    RESULTS="$LOWRANK_WORK${SMOKE:+/smoke}/quickstart/$(basename "$(run_folder "$attention")").jsonl"
    translation_rows >&2
fi
[ -z "$DRY_RUN" ] || exit 0

run="$(run_folder "$attention")" corpus="$(data_folder "$attention")"
# where this row has no line, or one with other flags than now, the recipe has said so
grep -qsF "\"row\": \"$attention\"" "$RESULTS" && [ -e "$run/generate-test.out" ] || exit 1
best="$run/checkpoints/checkpoint_best.pt"
(DRY_RUN=1 && translation_rows) 2>&1 | sed 's/^+ //' >"$run/commands"
if [ "$data" = grammar ]; then
    cat >>"$run/commands" <<END

your own sentences, in words of the corpus and with a space before each mark:
fairseq-interactive ${corpus@Q}/bin --user-dir ${ROOT@Q}/fairseq_lowrank --path ${best@Q} --beam 5
END
fi
echo >&2
python "$ROOT/examples/quickstart/report.py" --data "$corpus/bin" --commands "$run/commands" --checkpoint "$best" \
    --generated "$run/generate-test.out" --sources "$corpus/tok/test.de" --references "$corpus/tok/test.en"
