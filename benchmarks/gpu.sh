#!/usr/bin/env bash
# What only a GPU can tell of the kernels, in one command and less than 9 minutes: are they right there, how fast, in what memory.
#
#   benchmarks/gpu.sh [FOLDER]       writes FOLDER/gpu.json and FOLDER/gpu.svg (default: benchmarks/results)
#   DEVICE=cpu benchmarks/gpu.sh     tries the script itself without a GPU: tiny sizes, kernels interpreted
#
# Nothing is downloaded. Each step has a limit of time (together 520 seconds) and none stops the next: what is missing in
# gpu.json did not end in time or failed, and said so above. The goals that were set stand below, each with what was measured.
set -uo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
results=$(realpath -m -- "${1:-$root/benchmarks/results}")
cd "$root"
[ ! -e .venv ] || PATH="$PWD/.venv/bin:$PATH"
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

patience=1 workers=$(nproc)
[ "$workers" -le 16 ] || workers=16
layers=(python benchmarks/attention.py --device "$device" --baseline sdpa)
training=(python benchmarks/training.py --rows mha stock mixhead-a mixhead-a@blocked mixhead-b --device "$device")
if [ "$device" = cpu ]; then
    export TRITON_INTERPRET=1 patience=10 workers=1
    layers+=(--rounds 1 --tokens 1)
    many=(--embed-dim 32 --heads 2) few=(--embed-dim 16 --heads 2)
    training+=(--layers 1 --embed-dim 32 --heads 2 --vocabulary 50 --length 8 --tokens 8 --rounds 1)
    checks=(--cases 1 --dtype float32 --longest 8)
    tests=(-n 0 -k "more and keys")
    lengths=(16 24) long=(32) formula=(16)
else
    layers+=(--dtype bfloat16 --tokens 16384 --rounds 7)
    many=(--embed-dim 1024 --heads 16) few=(--embed-dim 256 --heads 4)
    training+=(--dtype bfloat16 --layers 16 --embed-dim 1024 --heads 16 --length 512 --tokens 8192 --rounds 7)
    checks=(--cases 10 --compositions 2)
    tests=(-n "$workers" -k "references or half or dropout or bit")
    lengths=(512 2048 8192) long=(32768) formula=(2048)
fi
operation=("${layers[@]}" "${many[@]}" --operation)
kernels=(mixhead-{a,b}@{triton,blocked} talking-heads@triton mha+sigsoftmax@triton)

# Kernels are compiled by as many processes as there are cores: that takes most of the time of these.
step check-kernels 110 bash -c 'seq "$1" | xargs -P "$1" -I{} fairseq-lowrank check-kernels --device "$2" "${@:3}" --seed {}' \
    check-kernels "$workers" "$device" "${checks[@]}"
step tests 80 python -m pytest -q -p no:cacheprovider tests/ops/attention/test_triton.py --device "$device" "${tests[@]}"
step operation 90 "${operation[@]}" --lengths "${lengths[@]}" --layers "${kernels[@]}" --output "$parts/operation.json" \
    --picture "$results/gpu.svg"
step long 40 "${operation[@]}" --lengths "${long[@]}" --layers mixhead-a@triton mixhead-b@triton --output "$parts/long.json"
step formula 40 "${operation[@]}" --lengths "${formula[@]}" \
    --layers mixhead-a@triton mixhead-a@reference mixhead-a@blocked mixhead-a@sdpa --output "$parts/formula.json"
step few-heads 40 "${layers[@]}" "${few[@]}" --operation --lengths "${lengths[@]}" --layers mixhead-a@{triton,blocked,sdpa} \
    --output "$parts/few-heads.json"
step layer 50 "${layers[@]}" "${many[@]}" --lengths "${lengths[@]}" --layers fairseq mha mixhead-{a,b} --output "$parts/layer.json"
step training 70 "${training[@]}" --output "$parts/training.json"

python benchmarks/gpu.py "$parts" "$results/gpu.json" || exit 1
! grep -qvP '\t0\t' "$parts/steps"
