#!/usr/bin/env bash
# Mixhead paper, figure 1: spectra of the attention matrices of Baevski and Auli's Transformer on WikiText-103, layer by
# layer, with and without Mixhead (A here; the paper says "our method"). The rows of table 1 that it needs are trained first if they are not done.
ROWS="${ROWS:-baevski-mha baevski-mixhead-a}"
source "$(dirname "${BASH_SOURCE[0]}")/table1.sh"
spectra mixhead-fig1 $ROWS
