#!/usr/bin/env bash
# Evidence, above the head size: spectra of the attention of above_head_size.sh's rows. Next to them are the same layers without
# mixing, with a random M equally far from I, with a random diagonal, and with M's other entries shuffled.
ROWS="${ROWS:-h32-mha h32-mixhead-a h4-mha h4-mixhead-a h32-fixedhead}"
source "$(dirname "${BASH_SOURCE[0]}")/above_head_size.sh"
spectra evidence-spectra --random-mixing $ROWS
