#!/usr/bin/env bash
# What: Spectra of the attention of above_head_size.sh's rows.
# Table: An experiment of this project: python -m experiments tables above-head-size.
# Result: Pictures and numbers, next to the same layers without mixing, and with three kinds of random M.
# Time: COST=1 estimates the training of the rows.
# Our choice: The random M: equally far from I, a random diagonal, and M's other entries shuffled.
ROWS="${ROWS:-h32-mha h32-mixhead-a h4-mha h4-mixhead-a h32-fixedhead}"
source "$(dirname "${BASH_SOURCE[0]}")/above_head_size.sh"
spectra evidence-spectra --random-mixing $ROWS
