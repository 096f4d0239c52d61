#!/usr/bin/env bash
# WikiText-2 or WikiText-103, ready for fairseq: words as published, or sub-words with --pieces.
# Prints the folder of the binarised corpus. See --help.
source "$(dirname "${BASH_SOURCE[0]}")/../examples/environment.sh"
exec python -m fairseq_lowrank.data.corpora wikitext "$@"
