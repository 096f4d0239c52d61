#!/usr/bin/env bash
# Evidence, parts 6 and 7: spectra of the attention of above_head_size.sh's rows, and of the same layers without mixing and with
# a random M equally far from I in place of what was learned.
ROWS="${ROWS:-h32-mha h32-mixhead-a h4-mha h4-mixhead-a h32-fixedhead}"
source "$(dirname "${BASH_SOURCE[0]}")/above_head_size.sh"
spectra evidence-spectra --random-mixing $ROWS
