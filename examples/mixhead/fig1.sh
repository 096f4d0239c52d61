#!/usr/bin/env bash
# What: Spectra of the attention matrices of Baevski and Auli's Transformer on WikiText-103, layer by layer, with and without
#   Mixhead.
# Table: Mixhead paper, figure 1.
# Result: Pictures and their numbers. Rows of table 1 that are not done are trained first.
# Time: COST=1 estimates the training of the rows.
# Our choice: Mixhead A. The paper says "our method".
ROWS="${ROWS:-baevski-mha baevski-mixhead-a}"
source "$(dirname "${BASH_SOURCE[0]}")/table1.sh"
spectra mixhead-fig1 $ROWS
