#!/usr/bin/env bash
# What only a GPU can tell of the kernels, in two commands of less than 9 minutes each.
#
#   benchmarks/gpu.sh goals [FOLDER]      what was set as a goal: values, times of attention, dropout, training and layers
#   benchmarks/gpu.sh causes [FOLDER]     random cases, tests, each pass alone, constants, the older measurement, few heads
#   DEVICE=cpu benchmarks/gpu.sh goals    tries the script itself without a GPU: tiny sizes, kernels interpreted
#
# Each writes FOLDER/gpu-goals.json or FOLDER/gpu-causes.json (default: benchmarks/results). Nothing is downloaded. Steps stand in
# the order of their worth. Each has a limit of time and none stops the next: what is missing in the file did not end in time or
# failed, and said so above. What is not installed is left out. Every backend with kernels of ours is measured.
set -uo pipefail
root="$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
what=${1:-}
if [ "$what" != goals ] && [ "$what" != causes ]; then
    echo "expected: benchmarks/gpu.sh goals or benchmarks/gpu.sh causes" >&2
    exit 2
fi
results=$(realpath -m -- "${2:-$root/benchmarks/results}")
CDPATH= cd "$root"
[ ! -e .venv ] || PATH="$PWD/.venv/bin:$PATH"
# A clone works without an installation.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
python=$(command -v python || command -v python3)
installed() { "$python" -c 'import importlib.util as i, sys; sys.exit(any(i.find_spec(name) is None for name in sys.argv[1:]))' "$@"; }
fairseq=() picture=()
! installed fairseq || fairseq=(fairseq)
! installed matplotlib || picture=(--picture "$results/gpu-$what.svg")
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
training=("$python" benchmarks/training.py --plain --device "$device" --dtype bfloat16)
command=("$python" -c 'import sys; from fairseq_lowrank.cli import main; sys.exit(main())')
if [ "$device" = cpu ]; then
    export TRITON_INTERPRET=1 patience=20 workers=1
    layers+=(--rounds 1 --tokens 1) baseline=(--baseline sdpa-flash)
    many=(--embed-dim 32 --heads 2) eight=(--embed-dim 16 --heads 2) four=(--embed-dim 16 --heads 2)
    values=(--heads 2 --head-dim 16 --tokens 1 --compositions mixhead-a --lengths 20 --longest 20)
    times=(--heads 2 --head-dim 16 --tokens 1 --compositions mixhead-a --lengths 20 --rounds 1 --warps 8 --stages 2)
    dropped=(--heads 2 --head-dim 16 --tokens 1 --compositions mixhead-a --lengths 20 --dropout 0.1 --no-variants)
    training+=(--layers 1 --embed-dim 32 --heads 2 --vocabulary 50 --length 8 --tokens 8 --rounds 1)
    checks=(--cases 1 --longest 8) tests=(-n 0 -k "more and keys")
    lengths=(16 24) long=(32) one=(16)
else
    layers+=(--tokens 16384 --rounds 7) baseline=(--baseline sdpa-flash sdpa-cudnn)
    many=(--embed-dim 1024 --heads 16) eight=(--embed-dim 512 --heads 8) four=(--embed-dim 256 --heads 4)
    # Every worker holds scores in float64: batches have as many programs as large tiles need, and no more.
    values=(--lengths 512 --tokens 8192) times=(--compositions mixhead-a --lengths 8192)
    dropped=(--compositions mixhead-a mixhead-b --heads 16 --lengths 2048 --dropout 0.1 --no-variants)
    training+=(--layers 16 --embed-dim 1024 --heads 16 --length 512 --tokens 8192 --rounds 7)
    checks=(--cases 10 --compositions 2) tests=(-n "$workers" -k "references or rounded or dropout or bit")
    lengths=(512 2048 8192) long=(32768) one=(2048)
fi
operation=("${layers[@]}" --operation)
kernels=({mixhead-a,mixhead-b,talking-heads,mha+sigsoftmax}@kernels)
shopt -s nullglob
modules=(tests/ops/attention/test_{trito[n],tile[d]}.py)

if [ "$what" = goals ]; then
    parallel values 110 "${passes[@]}" values --device "$device" "${values[@]}" --part "{}/$workers" --output "$parts/values-{}.json"
    step operation 90 "${operation[@]}" "${many[@]}" "${baseline[@]}" --lengths "${lengths[@]}" "${long[@]}" \
        --layers sdpa "${kernels[@]}" --output "$parts/operation.json" "${picture[@]}"
    parallel compile-dropout 60 "${passes[@]}" times --device "$device" "${dropped[@]}" --rounds 0 --part "{}/$workers"
    step dropout 30 "${operation[@]}" "${many[@]}" --baseline sdpa --lengths "${one[@]}" --dropout 0.1 \
        --layers "${kernels[@]:0:2}" --output "$parts/dropout.json"
    step training 90 "${training[@]}" --rows mha mixhead-{a,b}@kernels mixhead-a@blocked --output "$parts/training.json"
    step layer 60 "${layers[@]}" "${many[@]}" "${baseline[@]}" --lengths "${lengths[@]}" \
        --layers "${fairseq[@]}" mha mixhead-{a,b} "${kernels[@]:0:2}" --output "$parts/layer.json"
    step heads-8 30 "${operation[@]}" "${eight[@]}" "${baseline[@]}" --lengths "${lengths[@]}" --layers "${kernels[@]:0:2}" \
        --output "$parts/heads-8.json"
else
    step check-kernels 110 bash -c 'seq "$1" | xargs -P "$1" -I{} "${@:2}" --seed {}' check-kernels "$workers" \
        "${command[@]}" env --kernels --random-only --backend tiled --device "$device" "${checks[@]}"
    ! installed pytest xdist hypothesis ||
        step tests 110 "$python" -m pytest -q -p no:cacheprovider "${modules[@]}" --device "$device" "${tests[@]}"
    parallel compile 80 "${passes[@]}" times --device "$device" "${times[@]}" --rounds 0 --part "{}/$workers"
    step passes 60 "${passes[@]}" times --device "$device" "${times[@]}" --output "$parts/passes.json"
    step constants 15 "${passes[@]}" constants --device "$device" --output "$parts/constants.json"
    step glue 40 "${operation[@]}" "${many[@]}" --baseline sdpa --glue --lengths "${lengths[@]}" "${long[@]}" \
        --layers "${kernels[@]:0:2}" --output "$parts/glue.json"
    step formula 50 "${operation[@]}" "${many[@]}" "${baseline[@]}" --lengths "${one[@]}" \
        --layers mixhead-{a,b}@{reference,blocked} mixhead-a@sdpa --output "$parts/formula.json"
    step heads-4 40 "${operation[@]}" "${four[@]}" "${baseline[@]}" --lengths "${lengths[@]}" \
        --layers mixhead-a@{kernels,blocked,sdpa} --output "$parts/heads-4.json"
fi

"$python" benchmarks/gpu.py "$parts" "$results/gpu-$what.json" || exit 1
! grep -qvP '\t0\t' "$parts/steps"
