#!/usr/bin/env bash
# Mixhead paper, figure 3 (§4.4.1): spectra of the attention matrices on WikiText-103 (with sigsoftmax too) and on LM1B.
# The rows of tables 1 and 3 that it needs are trained first where they are not done.
ROWS="baevski-mha baevski-mha-sigsoftmax baevski-mixhead-a baevski-mixhead-b"
source "$(dirname "${BASH_SOURCE[0]}")/table1.sh"
spectra mixhead-fig3-wikitext-103 $ROWS

ROWS="baevski-mha baevski-mixhead-a baevski-mixhead-b"
source "$(dirname "${BASH_SOURCE[0]}")/table3.sh"
spectra mixhead-fig3-lm1b $ROWS
