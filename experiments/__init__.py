"""Corpora, recipes, controlled tasks and reports of our experiments. Run them from a clone; they are not installed."""
