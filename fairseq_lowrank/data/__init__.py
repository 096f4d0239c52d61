"""Preparing corpora and recording what was measured on them. Nothing here imports fairseq."""
