#!/usr/bin/env bash
# What: Which directions do the heads of trained models use? It measures models on two texts and trains nothing.
# Table: An experiment of this project: python -m experiments tables published-models.
# Result: Lines of `fairseq-lowrank measure` on WikiText-2 (test) and on film reviews.
# Time: Next to other work, in one thread: 57 minutes for an encoder of 22M parameters at 64x512, and 9 minutes for a text with a
#   decoder of 135M at quick16x512. Longer rows of a decoder take hours.
# Our choice: 512 tokens a sequence: first 64 of them with single layers, then 256 without. 64 sequences or fewer have single
#   layers. For a decoder of 30 layers and 135M parameters, 14x128 has about 2,000 passes of half a second each in one thread.
#
#   examples/evidence/published_models.sh MODEL…
#
# A MODEL is a folder that transformers' from_pretrained reads, or a GGUF file (with the package gguf). Rows that have a line in
# the results are skipped, so an interrupted recipe continues. For the control of quantised weights, make a folder whose weights
# are rounded to 4 bits:
#
#   python -m experiments.evidence.published_models --quantise FOLDER OUTPUT
#
# Environment variables:
#   SETTINGS="64x512 256x512"    numbers and lengths of sequences; with "quick" in front, as in quick16x128, fewer ranks are tried
#   TEXTS="wikitext-2 film-reviews"
#   RESULTS=FILE                 where lines go (default: results/evidence-published-models.jsonl)
#   LOWRANK_DATA, LOWRANK_WORK   folders of corpora, and of what is made here
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"
case "${1:-}" in
    "" | -h | --help)
        sed -n '2,/^source /{s/^# \{0,1\}//;/^source /!p}' "${BASH_SOURCE[0]}"
        [ $# -gt 0 ] && exit 0
        exit 2
        ;;
esac
results="${RESULTS:-$ROOT/results/evidence-published-models.jsonl}" made="$LOWRANK_WORK/published-models"
mkdir -p "$made"
declare -A files=([wikitext-2]=wikitext-2/test.txt.gz [film-reviews]=prose/film-reviews.txt.gz)
SETTINGS="${SETTINGS:-64x512 256x512}" TEXTS="${TEXTS:-wikitext-2 film-reviews}"
for setting in $SETTINGS; do
    if [[ ! "$setting" =~ ^(quick)?[1-9][0-9]{0,5}x[1-9][0-9]{0,5}$ ]]; then
        echo "SETTINGS=$SETTINGS: '$setting' is not a number and a length of sequences, such as 64x512 or quick16x128" >&2
        exit 2
    fi
done
for text in $TEXTS; do
    if [ -z "${files[$text]:-}" ]; then
        echo "TEXTS=$TEXTS: no text '$text' here. Choose from ${!files[*]}" >&2
        exit 2
    fi
done
for setting in $SETTINGS; do
    count="${setting#quick}" count="${count%x*}" length="${setting#*x}" flags=()
    case "$setting" in
        quick*) flags=(--quick) ;;
        *) [ "$count" -le 64 ] || flags=(--no-layers) ;;
    esac
    for model in "$@"; do
        for text in $TEXTS; do
            name="$(basename "$model" .gguf)" output="$made/$(basename "$model")-$text-$setting"
            row=("$name" "$text" "$setting")
            (
                if ! flock --nonblock 9; then
                    echo "$name, $text, $setting: another process measures this" >&2
                    exit
                fi
                if python -m experiments.evidence.published_models --results "$results" --has "${row[@]}"; then exit; fi
                echo "$name, $text, $setting" >&2
                python -m fairseq_lowrank.cli measure --transformers "$model" --text "$LOWRANK_DATA/${files[$text]}" \
                    --length "$length" --sequences "$count" "${flags[@]}" --output "$output" >"$output.log"
                python -m experiments.evidence.published_models --results "$results" --add "${row[@]}" "$output/measure.json"
            ) 9>"$output.lock"
        done
    done
done
python -m experiments.evidence.published_models --results "$results"
