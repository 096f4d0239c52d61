"""Corpora, recipes, controlled tasks and reports of our experiments; run from a clone, not installed."""
