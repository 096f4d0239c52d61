#!/usr/bin/env bash
# What: Spectra of the attention matrices on WikiText-103, with sigsoftmax too, and on LM1B, there also of Transformer-XL.
# Table: Mixhead paper, figure 3 (§4.4.1).
# Result: Pictures and their numbers. Rows of tables 1 and 3 that are not done are trained first.
# Time: 6 trainings, about 370 hours on one H100, each alone and under one seed, as COST=1 estimates.
# Our choice: Transformer-XL, whose n is below d_k, reads its segments alone, without memory, so that the matrices are square.
if [ -n "${ROWS:-}" ]; then
    echo "ROWS=$ROWS: figure 3 has fixed rows of two tables. Remove ROWS." >&2
    exit 2
fi
ROWS="baevski-mha baevski-mha-sigsoftmax baevski-mixhead-a baevski-mixhead-b"
source "$(dirname "${BASH_SOURCE[0]}")/table1.sh"
spectra mixhead-fig3-wikitext-103 $ROWS

BAEVSKI_ROWS="baevski-mha baevski-mixhead-a baevski-mixhead-b"
TRANSFORMER_XL_ROWS="transformer-xl-mha transformer-xl-mixhead-a transformer-xl-mixhead-b"
ROWS="$BAEVSKI_ROWS $TRANSFORMER_XL_ROWS"
source "$(dirname "${BASH_SOURCE[0]}")/table3.sh"
spectra mixhead-fig3-lm1b${TABLE#table3} $BAEVSKI_ROWS
spectra mixhead-fig3-lm1b-transformer-xl${TABLE#table3} $TRANSFORMER_XL_ROWS
