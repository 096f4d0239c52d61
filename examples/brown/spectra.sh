#!/usr/bin/env bash
# Spectra of the attention matrices of the Brown corpus models with 32 heads of size 8, which are trained first if they
# are not done.
ROWS="${ROWS:-mha-h32 mixhead-a-h32 mixhead-b-h32}"
source "$(dirname "${BASH_SOURCE[0]}")/compare.sh"
spectra brown-spectra $ROWS
