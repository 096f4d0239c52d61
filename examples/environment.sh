# Sourced by recipes and preparation scripts: where things are. Every variable can be set in the environment.
set -euo pipefail
shopt -s inherit_errexit
ROOT="$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ -z "${LOWRANK_DATA:-}" ]; then # published corpora
    LOWRANK_DATA="$ROOT/data"
    if [ ! -d "$LOWRANK_DATA" ] && [ -d "$ROOT/../shared/data" ]; then LOWRANK_DATA="$ROOT/../shared/data"; fi
fi
export LOWRANK_DATA
export LOWRANK_WORK="${LOWRANK_WORK:-${XDG_CACHE_HOME:-$HOME/.cache}/fairseq_lowrank}" # what we make of corpora
[[ "$LOWRANK_WORK" = /* ]] || LOWRANK_WORK="$PWD/$LOWRANK_WORK" # checkpoints and logs name it
if [[ "$LOWRANK_WORK" = *[,:]* ]]; then
    echo "LOWRANK_WORK=$LOWRANK_WORK: expected a folder without ',' and ':', at which fairseq splits its paths" >&2
    exit 2
fi
export LOWRANK_ENABLE="${LOWRANK_ENABLE-whole-validation,bf16-evaluation,last-update}" # patches of fairseq that results were made with
export PYTHONSAFEPATH=1 # what lies in the current folder is not imported
# glibc would give the memory of every large tensor back and fetch it again page by page: 8% of the time of a CPU run.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592}"
if [ -x "$ROOT/.venv/bin/python" ]; then
    export PATH="$ROOT/.venv/bin:$PATH" PYTHONPATH="$ROOT" # a path of the caller would hide what is pinned there
else
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
fi

# needs_setup: end with one line if neither .venv nor the Python on PATH has what recipes need.
needs_setup() {
    command python -c 'import importlib.util as found; 1 / all(map(found.find_spec, ("torch", "fairseq")))' 2>/dev/null || {
        echo "torch or fairseq is not installed. Run scripts/setup.sh first." >&2
        exit 2
    }
}

# switch NAME: a variable that is 1, or 0 or empty for off.
switch() {
    case "${!1:-}" in
        1) ;;
        "" | 0) printf -v "$1" '' ;;
        *)
            echo "$1=${!1}: expected 1, or 0 for off" >&2
            exit 2
            ;;
    esac
}

# no_arguments SCRIPT SETTINGS ARGUMENTS…: a script that takes none prints its head and that of SETTINGS for --help, and
# refuses others.
no_arguments() {
    case "${3:-}" in
        "") if [ $# -lt 3 ]; then return; fi ;;
        -h | --help)
            if [ $# = 3 ]; then
                sed '1{/^#!/d}; /^#/!Q; s/^# \{0,1\}//' "$1"
                # the script itself, which prints its rows in place of training them
                rows="$(LIST_ROWS=1 DRY_RUN=1 "$BASH" "$1" 2>/dev/null | sed -n 's/^row: //p')" || rows=""
                if [ -n "$rows" ]; then printf '\nRows:\n%s\n' "$(fmt -w 120 <<<"$rows" | sed 's/^/  /')"; fi
                echo
                sed -n '/^# Environment variables:/,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$2"
                exit
            fi
            ;;
    esac
    echo "$(basename "$1"): unknown argument '${3}'; it takes settings from the environment: see --help" >&2
    exit 2
}
