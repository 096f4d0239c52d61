#!/usr/bin/env bash
# The One Billion Word benchmark, ready for fairseq: words, or sub-words with --pieces.
# Prints the folder of the binarised corpus. See --help.
source "$(dirname "${BASH_SOURCE[0]}")/../examples/environment.sh"
exec python -m fairseq_lowrank.data.corpora lm1b "$@"
