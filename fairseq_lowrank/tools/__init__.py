"""Tools for a model or a checkpoint: parameter counts, spectra, inspection, conversion, translations."""
