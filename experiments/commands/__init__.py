"""The subcommands of ``python -m experiments``, one module each, built like those of :mod:`fairseq_lowrank.cli`."""
