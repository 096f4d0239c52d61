# Sourced by recipes and preparation scripts: where things are. Every variable can be set from outside.
set -euo pipefail
shopt -s inherit_errexit
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export LOWRANK_DATA="${LOWRANK_DATA:-$ROOT/../shared/data}"                            # published corpora
export LOWRANK_WORK="${LOWRANK_WORK:-${XDG_CACHE_HOME:-$HOME/.cache}/fairseq_lowrank}" # what we make of them
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
# glibc would give the memory of every large tensor back and fetch it again page by page: 8% of the time of a CPU run.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592}"
if [ -x "$ROOT/.venv/bin/python" ]; then PATH="$ROOT/.venv/bin:$PATH"; fi
