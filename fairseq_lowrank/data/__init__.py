"""Preparing corpora and recording what was measured on them; fairseq is imported for its binary format alone."""
