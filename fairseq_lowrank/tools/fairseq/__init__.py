"""Tools for models and checkpoints of fairseq."""
