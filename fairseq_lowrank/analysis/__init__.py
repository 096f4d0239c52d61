"""Instruments that show the bottleneck: spectra, parameter counts, the representation theorem, advice, reports."""
