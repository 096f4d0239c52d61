#!/usr/bin/env bash
# What only a GPU can tell of the kernels, in one command of at most 8 minutes.
#
#   benchmarks/gpu.sh [FOLDER]          writes FOLDER/gpu-sets.json (default: benchmarks/results)
#   DEVICE=cpu benchmarks/gpu.sh        tries the script itself without a GPU: tiny sizes, kernels interpreted
#
# Nothing is downloaded. Steps stand in the order of their worth. Each has a limit of time and none stops the next: what is missing
# in the file did not end in time or failed, and said so above. Kernels are compiled by all processors, before they are timed.
set -uo pipefail
root="$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
results=$(realpath -m -- "${1:-$root/benchmarks/results}")
CDPATH= cd "$root"
[ ! -e .venv ] || PATH="$PWD/.venv/bin:$PATH"
# A clone works without an installation.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
python=$(command -v python || command -v python3)
device=${DEVICE:-cuda}
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
mkdir -p "$results"

step() { # NAME SECONDS COMMAND…
    local start=$SECONDS status=0
    printf '\n== %s\n' "$1"
    timeout -k 2 "$(($2 * patience))" "${@:3}" || status=$?
    [ "$status" = 0 ] || printf '== %s: status %s after %s s\n' "$1" "$status" "$((SECONDS - start))"
    printf '%s\t%s\t%s\n' "$1" "$status" "$((SECONDS - start))" >>"$parts/steps"
}

# NAME SECONDS COMMAND…, once for each worker, whose number replaces {}. Compiling the kernels takes most of the time of these.
parallel() { step "$1" "$2" bash -c 'seq 0 $(($1 - 1)) | xargs -P "$1" -I{} "${@:2}"' parallel "$workers" "${@:3}"; }

patience=1 workers=$(nproc)
[ "$workers" -le 16 ] || workers=16
layers=("$python" benchmarks/attention.py --device "$device" --dtype bfloat16)
passes=("$python" benchmarks/passes.py)
training=("$python" benchmarks/training.py --plain --device "$device" --dtype bfloat16 --rows mha mixhead-{a,b}@tiled)
if [ "$device" = cpu ]; then
    export TRITON_INTERPRET=1 OMP_NUM_THREADS=1 patience=20 workers=1
    shapes=(2x16) one=2x16 few=(2x16) lengths=(16) long=16
    layers+=(--rounds 1 --tokens 1) baseline=(--baseline sdpa-flash)
    values=(--tokens 1 --longest 16) times=(--tokens 1 --rounds 1 --no-variants) kinds=(mixhead-b) more=(mixhead-b@tiled)
    training+=(--layers 1 --embed-dim 32 --heads 2 --vocabulary 50 --length 16 --tokens 16 --rounds 1)
else
    shapes=({16,12,8,32}x{64,32,128}) one=16x64 few=(16x64 12x64) lengths=(512 2048 8192) long=8192
    layers+=(--tokens 16384 --rounds 7) baseline=(--baseline sdpa-flash sdpa-cudnn)
    # Every worker holds scores in float64: batches have as many programs as large tiles need, and no more.
    values=(--tokens 8192) times=(--tokens 16384 --rounds 7) kinds=(mixhead-b talking-heads sigsoftmax)
    more=({mixhead-b,talking-heads,mha+sigsoftmax}@kernels)
    training+=(--layers 16 --embed-dim 1024 --heads 16 --length 512 --tokens 8192 --rounds 7)
fi
operation=("${layers[@]}" --operation "${baseline[@]}" --layers)
values+=(--device "$device" --lengths 512 --part "{}/$workers")
times+=(--device "$device" --backends tiled --compositions mixhead-a --lengths "$long")

# Both sets of kernels against the formula in float64. The next steps take the kernels that these compile.
parallel values 85 "${passes[@]}" values "${values[@]}" --compositions mixhead-a --shapes "${shapes[@]}" --output "$parts/values-{}.json"
parallel kinds 30 "${passes[@]}" values "${values[@]}" --compositions "${kinds[@]}" --shapes "$one" --output "$parts/kinds-{}.json"
step operation 130 "${operation[@]}" mixhead-a@kernels --shapes "${shapes[@]}" --lengths "${lengths[@]}" --output "$parts/operation.json"
step others 45 "${operation[@]}" "${more[@]}" --shapes "$one" --lengths "${lengths[@]}" --output "$parts/others.json"
step training 50 "${training[@]}" --output "$parts/training.json"
step layer 35 "${layers[@]}" "${baseline[@]}" --layers mha mixhead-{a,b}@tiled --shapes "$one" --lengths "${lengths[@]}" \
    --output "$parts/layer.json"
parallel compile 45 "${passes[@]}" times "${times[@]}" --shapes "${few[@]}" --rounds 0 --part "{}/$workers"
step passes 40 "${passes[@]}" times "${times[@]}" --shapes "${few[@]}" --output "$parts/passes.json"

"$python" benchmarks/gpu.py "$parts" "$results/gpu-sets.json" || exit 1
! grep -qvP '\t0\t' "$parts/steps"
