"""The subcommands of ``python -m experiments``, with one module each, as in :mod:`fairseq_lowrank.cli`."""
