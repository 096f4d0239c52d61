"""Prepare the papers' corpora for fairseq: a module for each, which :mod:`experiments.corpora.catalogue` finds by itself.

A preparation is a chain of files, each written whole or not at all, so that calling it again continues where it stopped
and does nothing once it is done:

    raw/   what the publisher's files say, a sentence a line        tok/   tokenised, cleaned
    bpe/   cut into sub-words                                       bin/   fairseq's binary form

The settings that shape these files are saved with them in settings.json: a folder is not made half one way, half another. Of several
processes that prepare the same corpus one does it and the others wait.

Shared by the modules: `corpus` (what a corpus declares, and the names of its forms), `steps`, `fetch` (published files),
`text` (lines, tokens, sub-words).
"""
