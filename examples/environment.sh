# Sourced by recipes and preparation scripts: where things are. Every variable can be set from outside.
set -euo pipefail
shopt -s inherit_errexit
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export LOWRANK_DATA="${LOWRANK_DATA:-$ROOT/../shared/data}"                            # published corpora
export LOWRANK_WORK="${LOWRANK_WORK:-${XDG_CACHE_HOME:-$HOME/.cache}/fairseq_lowrank}" # what we make of them
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
if [ -x "$ROOT/.venv/bin/python" ]; then PATH="$ROOT/.venv/bin:$PATH"; fi
