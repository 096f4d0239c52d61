#!/usr/bin/env bash
# What only a GPU can tell of the kernels, in one command and less than 9 minutes: are they right there, how fast, in what memory.
#
#   benchmarks/gpu.sh [FOLDER]       writes FOLDER/gpu.json and FOLDER/gpu.svg (default: benchmarks/results)
#   DEVICE=cpu benchmarks/gpu.sh     tries the script itself without a GPU: tiny sizes, kernels interpreted
#
# Nothing is downloaded. Each step has a limit of time and none stops the next: what is missing in gpu.json did not end in time
# or failed, and said so above.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ ! -e .venv ] || PATH="$PWD/.venv/bin:$PATH"
results=${1:-benchmarks/results}
device=${DEVICE:-cuda}
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
mkdir -p "$results"

step() { # NAME SECONDS COMMAND…
    local start=$SECONDS status=0
    printf '\n== %s\n' "$1"
    timeout "$(($2 * patience))" "${@:3}" || status=$?
    [ "$status" = 0 ] || printf '== %s: status %s after %s s\n' "$1" "$status" "$((SECONDS - start))"
    printf '%s\t%s\t%s\n' "$1" "$status" "$((SECONDS - start))" >>"$parts/steps"
}

patience=1
attention=(python benchmarks/attention.py --device "$device" --baseline sdpa)
training=(python benchmarks/training.py --rows mha mixhead-a --device "$device")
if [ "$device" = cpu ]; then
    export TRITON_INTERPRET=1 patience=10
    attention+=(--embed-dim 32 --heads 2 --rounds 1 --tokens 1)
    training+=(--layers 1 --embed-dim 32 --heads 2 --vocabulary 50 --length 8 --tokens 8 --rounds 1)
    checks=(--cases 1 --dtype float32 --seed 8)
    tests=(-k "more and keys")
    lengths=(16) long=(32)
else
    attention+=(--dtype bfloat16 --embed-dim 1024 --heads 16 --tokens 16384 --rounds 7)
    training+=(--dtype bfloat16 --layers 16 --embed-dim 1024 --heads 8 --length 512 --tokens 8192 --rounds 7)
    checks=(--cases 200)
    tests=(-k "references or half or dropout or bit")
    lengths=(2048 8192) long=(32768)
fi
kernels=(mixhead-a@triton mixhead-b@triton talking-heads@triton mha+sigsoftmax@triton)

step check-kernels 110 fairseq-lowrank check-kernels --device "$device" "${checks[@]}"
step formula 50 "${attention[@]}" --lengths "${lengths[0]}" \
    --layers mixhead-a@triton mixhead-a@reference mixhead-a@blocked mixhead-a@sdpa --output "$parts/formula.json"
step attention 90 "${attention[@]}" --lengths "${lengths[@]}" --layers "${kernels[@]}" --output "$parts/attention.json" \
    --picture "$results/gpu.svg"
step long 60 "${attention[@]}" --lengths "${long[@]}" --layers mixhead-a@triton mixhead-b@triton --output "$parts/long.json"
step training 80 "${training[@]}" --output "$parts/training.json"
step tests 130 python -m pytest -q -p no:cacheprovider -n 0 tests/ops/attention/test_triton.py --device "$device" "${tests[@]}"

python - "$parts" "$results/gpu.json" <<'END'
import json, sys
from pathlib import Path

parts, output = map(Path, sys.argv[1:])
steps = [line.split("\t") for line in (parts / "steps").read_text().splitlines()]
gathered = {"steps": [{"name": name, "status": int(status), "seconds": int(taken)} for name, status, taken in steps]}
gathered |= {file.stem: json.loads(file.read_text()) for file in sorted(parts.glob("*.json"))}
output.write_text(json.dumps(gathered, indent=1, ensure_ascii=False) + "\n")
print(f"wrote {output}")
END
! grep -qvP '\t0\t' "$parts/steps"
