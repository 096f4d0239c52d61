#!/usr/bin/env bash
# What: The headline claims of the documents in byte language models: width against heads, rank of the embedding, shared heads.
# Table: An experiment of this project, with predictions: `python -m experiments tables documents`.
# Result: Bits per byte, each row at its best rate. Without ROWS the recipe chooses the rates: it trains what
#   `python -m experiments.evidence.documents` prints, until that prints nothing. Then it trains recall at other rates, and the
#   rows that the tuned comparison lacks. Call it again to continue: what has a line is not trained again.
# Time: About 220 trainings. The first took 9 minutes of processor time on a busy core, so all take up to 17 hours.
# Our choice: Pre-norm, 2,000 updates of 2,048 bytes. Rows of a comparison have equal weights outside the embeddings within 1 %,
#   except width-e and sharing, where only `narrow` equals MHE. Three rates under seed 1, and seeds 2 to 6 at the best.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$ROOT/examples/settings.sh"
PAPER=evidence-documents TABLE=documents CORPUS=brown-bpe257 PLUGIN=examples/evidence/controls
COMMON=("${BYTES[@]}")
RATES="7.5e-4 1.5e-3 3e-3 6e-3 1.2e-2 2.4e-2 4.8e-2"
if [ -n "$COST" ]; then RATES=6e-3; fi # a row costs eight times as much: three rates, and five seeds at the best
OURS="--arch lowrank_transformer_lm --share-decoder-input-output-embed --attention"

# at_rates NAME FLAGS…: a row at each rate. $longer: also with 6,000 updates.
at_rates() {
    local rate updates
    for updates in 2000 ${longer:-}; do
        for rate in $RATES; do
            row $1-$rate$([ $updates = 2000 ] || echo -$updates) "${@:2}" $(decayed $rate $updates)
        done
    done
}
# size LAYERS WIDTH FFN HEADS
size() { echo "--decoder-layers $1 $(lm_width $2) --decoder-ffn-embed-dim $3 --decoder-attention-heads $4"; }

# Is h·d_k above the width better (FixedHead), or are these weights better spent on width (the vocabulary bottleneck)?
longer=6000 at_rates width-a $OURS mha --head-dim 32 $(size 4 64 256 8)
longer=6000 at_rates width-b $OURS mha $(size 4 92 352 4)
for heads in 8 2 4 16; do
    at_rates width-$heads-heads $OURS mha $(size 4 64 640 $heads)
done
at_rates width-e $OURS mha $(size 4 128 512 4)

# Does depth win over width where the rank of the embedding binds? The factors of the embedding start with the variance of a
# whole one at every rank, and the output matrix is full.
for rank in 4 16 full; do
    for shape in wide deep; do
        case $shape in wide) width=128 layers=2 ;; deep) width=64 layers=8 ;; esac
        [ $rank = full ] && rows=$width || rows=$rank
        at_rates depth-$shape-r$rank --arch transformer_lm_factored --attention mha --embed-rank $rows \
            $(size $layers $width $((4 * width)) $((width / 16)))
    done
done

# What do shared heads lose? `narrow` is mha with as many weights as mhe-mul.
for heads in 4 16; do
    [ $heads = 4 ] && narrow=186 others="mqa skv el" || narrow=168 others=""
    for method in mha mhe-mul mhe-add sha $others; do
        at_rates sharing-h$heads-$method $OURS $method $(size 4 64 256 $heads)
    done
    at_rates sharing-h$heads-narrow $OURS mha $(size 4 64 $narrow $heads)
done

if [ -n "${ROWS:-}$SMOKE$DRY_RUN$COST${LIST_ROWS:-}" ]; then
    loss_on_blocks
    exit
fi
before=""
while next="$(python -m experiments.evidence.documents ${RESULTS:+--results "$RESULTS"})" && [ -n "$next" ]; do
    if [ "$next" = "$before" ]; then exit; fi # another process is at these rows
    before="$next"
    SEED="${next%% *}" ROWS="${next#* }" loss_on_blocks
done

# Recall at other rates, and what the tuned comparison of language_model.sh lacks.
python -m experiments controlled recall --rows 'h[48]-(mha|gain|score-gain|queries-64)-(1e-3|3.2e-3|1e-2|3.2e-2)' --seeds 1 \
    --results "${RESULTS:-$ROOT/results/evidence-recall.jsonl}" --log "$ROOT/results/logs/evidence-recall.log.gz"
language_model() { LINEAR=torch SEEDS="$1" ROWS="$2" "$ROOT/examples/evidence/language_model.sh"; }
language_model 1 "h32-score-gain-x32-3e-3 h32-score-gain-x32-4e-3 h32-score-gain-x32-6e-3 h32-mha-6e-3"
language_model "1 2 3" "h32-mha-3e-3-3200 h32-mha-equal-time"
