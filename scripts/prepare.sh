#!/usr/bin/env bash
# Prepare a corpus for fairseq, or a form of one: scripts/prepare.sh brown, or wikitext-103-bpe2000.
# Prints the folder of the binarised corpus. See --help, and NAME --help.
source "$(dirname "${BASH_SOURCE[0]}")/../examples/environment.sh"
needs_setup
python -m experiments.corpora "$@"
