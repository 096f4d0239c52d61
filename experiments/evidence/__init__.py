"""Programs that score trained models of the evidence: run from a clone as ``python -m experiments.evidence.NAME``."""
