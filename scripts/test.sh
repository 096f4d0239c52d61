#!/usr/bin/env bash
# Everything that has to hold: ruff's checks and format, mypy's types, and the tests. Sets up .venv first.
#
#   scripts/test.sh [ARGUMENT…]      arguments go to pytest: scripts/test.sh tests/ops -k causal
#   scripts/test.sh --quick          style, types and the core: operations, layer, methods and plugin, without whole commands
#   scripts/test.sh -m 'not corpus'  only what needs no real corpus
#   scripts/test.sh --all            the whole grid too: further presets in tests of whole commands
#   LOWRANK_DATA=…                   the folder with real corpora (default: ../shared/data); without a corpus its tests
#                                    are skipped, or fail where CI is set
set -euo pipefail
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH # it would hide what is pinned
scripts/setup.sh --test
export PATH="$PWD/.venv/bin:$PATH"

ruff check .
ruff format --check .
mypy # the package, with the exceptions that pyproject.toml names
# A process for each core, of one thread each: threads that share a core wait for one another. A file's tests stay together,
# since they share what they trained, and the longest files come first (tests/conftest.py).
processes=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # nproc obeys both
export OMP_NUM_THREADS=1
if [ "${1:-}" = --quick ]; then
    set -- tests/ops tests/attention tests/methods tests/plugin tests/test_layers.py tests/test_importing.py tests/test_messages.py \
        -m 'not command and not corpus' "${@:2}"
fi
exec pytest -q --numprocesses "$((processes < 8 ? processes : 8))" --dist loadfile --no-loadscope-reorder "$@"
