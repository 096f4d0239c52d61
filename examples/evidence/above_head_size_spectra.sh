#!/usr/bin/env bash
# Evidence, part 6: spectra of the attention of above_head_size.sh's rows, and of the same layers without mixing, with a random M
# equally far from I in place of what was learned, with one of its diagonal, and with M's other entries shuffled.
ROWS="${ROWS:-h32-mha h32-mixhead-a h4-mha h4-mixhead-a h32-fixedhead}"
source "$(dirname "${BASH_SOURCE[0]}")/above_head_size.sh"
spectra evidence-spectra --random-mixing $ROWS
