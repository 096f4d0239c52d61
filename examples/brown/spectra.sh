#!/usr/bin/env bash
# What: Spectra of the attention matrices of the Brown models with 32 heads of size 8.
# Table: An experiment of this project, without a paper.
# Result: Pictures and their numbers. Rows of compare.sh that are not done are trained first.
# Time: COST=1 estimates the training of the rows.
# Our choice: The settings of compare.sh.
ROWS="${ROWS:-mha-h32 mixhead-a-h32 mixhead-b-h32}"
source "$(dirname "${BASH_SOURCE[0]}")/compare.sh"
spectra brown-spectra $ROWS
