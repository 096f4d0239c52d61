#!/usr/bin/env bash
# WMT'14, English to German, ready for fairseq: Moses-tokenised, 40k joint BPE, one dictionary.
# Prints the folder of the binarised corpus. See --help.
source "$(dirname "${BASH_SOURCE[0]}")/../examples/environment.sh"
exec python -m fairseq_lowrank.data.corpora wmt14 "$@"
