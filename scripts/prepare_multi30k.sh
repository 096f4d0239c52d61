#!/usr/bin/env bash
# Multi30k, German to English, ready for fairseq: lower-cased, Moses-tokenised, 6,000 joint BPE pieces.
# Prints the folder of the binarised corpus. See --help.
source "$(dirname "${BASH_SOURCE[0]}")/../examples/environment.sh"
exec python -m fairseq_lowrank.data.corpora multi30k "$@"
