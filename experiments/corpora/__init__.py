"""Preparation of the papers' corpora for fairseq, with a module for each; :mod:`experiments.corpora.catalogue` finds them.

A preparation makes a chain of files. Each is written completely or not at all, so a second call resumes where the first
one stopped, or does nothing:

    raw/   the publisher's text, one sentence per line              tok/   tokenised and cleaned text
    bpe/   subwords                                                 bin/   fairseq's binary files

The settings of these files are saved in settings.json, so all files of a folder have the same settings. If several processes
prepare the same corpus, one does and the others wait.

The modules share `corpus` (the declaration of a corpus, and the names of its variants), `steps`, `fetch` (published files) and
`text` (lines, tokens, subwords).
"""
