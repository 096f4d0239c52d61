#!/usr/bin/env bash
# IWSLT'14, German to English, ready for fairseq: lower-cased, Moses-tokenised, 10k joint BPE.
# Prints the folder of the binarised corpus. See --help.
source "$(dirname "${BASH_SOURCE[0]}")/../examples/environment.sh"
exec python -m fairseq_lowrank.data.corpora iwslt14 "$@"
